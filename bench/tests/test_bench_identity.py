# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What bench.identity calls the same code, and that its files say what its runs found."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
identity = importlib.import_module("bench.identity")

PTX = """.version 8.0
.file 1 "kernel.py"
// a comment
.visible .entry append(
    .param .u64 append_param_0
)
{
    .loc 1 7 3
    ld.param.b64 %rd1, [append_param_0]; // the pool
    ret;
}
"""


def test_comments_places_and_names_of_kernels_are_no_part_of_code():
    other = PTX.replace("append", "store").replace(".loc 1 7 3", ".loc 1 9 1").replace("the pool", "blocks")
    assert identity.plain(other, "", False) == identity.plain(PTX, "", False)
    assert "[kernel0_param_0]" in identity.plain(PTX, "", False)


def test_instructions_and_launches_are_part_of_code():
    assert identity.plain(PTX.replace("b64 %rd1", "b32 %rd1"), "", False) != identity.plain(PTX, "", False)
    assert identity.plain(PTX, "grid=(1, 1, 1)", False) != identity.plain(PTX, "grid=(2, 1, 1)", False)


def test_a_run_is_compared_with_what_one_before_wrote(tmp_path, capsys):
    file = tmp_path / "before"
    only = ["--only", "^(increment|shift_tokens)", "--target", "host"]
    assert identity.main([*only, "--write", str(file)]) == 0
    assert identity.main([*only, "--against", str(file)]) == 0
    assert capsys.readouterr().out == "2 programs, 0 differ\n"
    first, second = file.read_text().splitlines()
    file.write_text(f"0000000000000000{first[16:]}\n{second}_before\n")
    assert identity.main([*only, "--against", str(file)]) == 1
    out = capsys.readouterr().out
    assert out.count(": changed: 0000000000000000 -> ") == out.count(": new") == out.count(": gone") == 1
    assert out.endswith("2 programs, 3 differ\n")
