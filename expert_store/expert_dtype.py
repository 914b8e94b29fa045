"""What `--expert-dtype` means: how routed experts are stored.

    auto                    as the checkpoint has them: codes stay codes, floats are --dtype
    bf16, fp16, fp32        floats of this type, like everything else of the model
    int8, int4, mxfp4, ...  quantised while loading, whatever the checkpoint holds
    int4-g64, int4-g32-zero the same with the size of groups, or zero points, said

Standard library and msgspec only, so that the command line can look before anything heavy starts.
"""

from __future__ import annotations

import re

from expert_store.formats import NAMED_FORMATS, WeightFormat, find_format_fault
from protocol.errors import UserError

PLAIN_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EXPERT_DTYPES = ("auto", *PLAIN_DTYPES, *NAMED_FORMATS)


def parse_expert_dtype(text: str) -> WeightFormat | None:
    """The format that a name asks for; None for auto and for floats.

    Raises:
        UserError: no such name; it lists those there are.
    """
    if text == "auto" or text in PLAIN_DTYPES:
        return None
    if text in NAMED_FORMATS:
        return NAMED_FORMATS[text]
    found = re.fullmatch(r"(int8|int4)-g(\d{1,4})(-zero)?", text, re.ASCII)
    if found:
        weights = WeightFormat(
            kind="int8" if found[1] == "int8" else "int4",
            group_size=int(found[2]),
            scale="float16",
            has_zero_points=found[3] is not None,
        )
        if find_format_fault(weights) is None:
            return weights
    raise UserError(
        f"--expert-dtype {text!r} is not known; say {', '.join(EXPERT_DTYPES)}, or int4 and int8"
        " with groups of 32, 64 or 128 like int4-g64, int4 with zero points like int4-g64-zero."
    )


def rows_dtype(dtype: str, expert_dtype: str) -> str:
    """`--dtype` as it follows from both flags: experts in floats are of the model's own type.

    Raises:
        UserError: the two contradict each other.
    """
    plain = PLAIN_DTYPES.get(expert_dtype)
    if plain is None:
        return dtype
    if dtype not in ("auto", plain):
        raise UserError(
            f"--expert-dtype {expert_dtype} beside --dtype {dtype}: experts in floats have the"
            " model's own type; leave one of the two out."
        )
    return plain
