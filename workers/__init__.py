"""Workers: process groups, the context-parallel engine, the model and one training step."""

import warnings

# At import, megatron-core warns of every accelerator library that is absent, in each worker.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
