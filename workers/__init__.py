"""Workers: process groups, the context-parallel engine, the model and one training step."""
