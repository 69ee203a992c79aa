# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The other ranks report a late rank by name: torchrun --nproc-per-node 2 examples/parallel/late.py"""

import datetime
import time

import torch
import torch.distributed as dist

import kvarn as kv

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
parallel = kv.parallel.HeadParallel(2, timeout=2.0)
if dist.get_rank() == 1:
    time.sleep(4)  # rank 0 times out before
try:
    parallel.gather(torch.zeros(3, 1, 8))
except kv.parallel.RankError as error:
    print(error)
    if error.ranks != (1,):
        raise
else:
    raise AssertionError("the late rank was not reported")
