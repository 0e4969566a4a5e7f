"""The demo model: a small trained Mixture-of-Experts language model, its training and its bundled workloads.

``README.md`` is its model card.  The weights are an ordinary Hugging Face folder; the text it learnt from is not here.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The Hugging Face folder: config, weights, tokenizer."""
