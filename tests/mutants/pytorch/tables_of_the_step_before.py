# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""In transformers' continuous batching, the tables of one step are those of all later ones: sequences that grow or
change places read and write others' pages.
"""

SYMBOL = "kvarn.torch.huggingface.continuous:_pages"
OLD = "    if _step[0] is not step:\n"
NEW = "    if _step[0] is None:\n"
CAUGHT_BY = ("tests/pytorch/test_continuous.py::test_generate_batch_gives_the_tokens_of_a_plain_generation[llama]",)
