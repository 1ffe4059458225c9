"""The persistent compilation cache: a second start of the same model compiles nothing."""

from __future__ import annotations

import jax

from widemesh.serving.user_cache import user_cache_folder


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX has been told of a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache_folder() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
