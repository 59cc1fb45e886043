"""The `hydra-ray` command line."""
