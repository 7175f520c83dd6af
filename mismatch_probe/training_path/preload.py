"""Imports what jobs on a checkpoint need, and has transformers make its table of renamed weights, once for all jobs."""

import transformers.modeling_layers
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
