"""Functions with the names and signatures that other projects call. The core does not know of them."""
