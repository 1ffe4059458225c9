"""Most that one request may ask for. The widths of the step's arrays come from here; going above is refused."""

MAX_LOGIT_BIASES = 300
MAX_STOP_IDS = 64  # the model's end-of-text ids included
MAX_LOGPROBS = 20  # most likely tokens beside each chosen one
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
MAX_PRIORITY = 2**31 - 1  # of either sign
