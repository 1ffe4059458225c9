"""Choosing the next token of every slot from its logits: filters, penalties, constraints, noise, log-probabilities."""

from widemesh.serving.sampling.logprobs import RowLogprobs, token_logprobs
from widemesh.serving.sampling.rows import SamplingRows, full_mask, mask_words
from widemesh.serving.sampling.sample import Draw, sample
from widemesh.serving.sampling.slots import SlotSettings
from widemesh.serving.sampling.tally import Tally, TallyRow, init_tally, write_tally

__all__ = ["Draw", "RowLogprobs", "SamplingRows", "SlotSettings", "Tally", "TallyRow", "full_mask", "init_tally",
           "mask_words", "sample", "token_logprobs", "write_tally"]  # fmt: skip
