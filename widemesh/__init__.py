"""widemesh: serve DeepSeek-V4.1-Flash, and smaller models of its architecture, from JAX."""

__version__ = "0.1.0"
