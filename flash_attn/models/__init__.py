"""Models that are made of :mod:`flash_attn.modules`, and load the weights that Hugging Face has."""
