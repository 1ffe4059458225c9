"""The hash by which a row takes turns between the copies of an expert, for the host and for devices. Imports no jax."""

FACTOR = 2654435769  # 2^32 over the golden ratio: consecutive rows spread evenly over any few copies
