"""Every default of the engine that a user can meet, in one place."""

N_CTX = 4096  # context when none is asked for, or the model's own if that is shorter
MAX_N_CTX = 1 << 24  # positions are exact in float32 up to here; no model is trained for as many
KV_TYPE = "f16"
ACTIVATIONS = "int8x2"  # chosen by the measurements in docs/NUMERICS.md, section 7
DRAFT_ACTIVATIONS = "int8"  # a draft proposes: its bits need be the same, not exact (section 7)
ACTIVATION_TYPES = ("int8", "int8x2")
PREFILL_ROWS = 256  # rows of a prefill chunk; sizes scratch, never changes a result
LOGIT_ROWS = 16  # rows of logits computed at once: the largest verify block
CHECKPOINTS = 4  # of a recurrent state, per session: lengths that a next prompt can go on from
NUMERICS = "1"  # version of the contract in docs/NUMERICS.md; higher when any bit changes
