"""hydra-opt: a planner that searches the target in seconds instead of trusting a closed form."""
