# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Over the model's own cache a mask with padding counts as one without where a step has fewer queries than keys: decode
steps attend to the padding on the left.
"""

SYMBOL = "kvarn.torch.huggingface.given:_by_name"
OLD = "if mask.queries != mask.keys or mask.q_offset or mask.kv_offset:\n        return None, {}"
NEW = "if mask.queries != mask.keys or mask.q_offset or mask.kv_offset:\n        return None, named"
CAUGHT_BY = ("tests/pytorch/test_masks.py::test_every_mask_that_transformers_makes_is_computed",)
