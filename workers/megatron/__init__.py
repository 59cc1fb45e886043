"""The model: Megatron-core's own layers, schedules, DDP and optimizers, told which MB they run."""
