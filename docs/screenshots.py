# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Take the pictures of docs/kernel-report.md again: python docs/screenshots.py, from the repository's folder.

Needs Chromium on PATH, an assembler and nvdisasm; pngquant, where there is one, makes the files smaller.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kvarn as kv
from kvarn.tools import cli

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
SPEC = "keys=paged(bf16, num_heads=4, head_size=64, page_size=16)"


def shoot(url: str, to: Path, size: tuple[int, int], dark: bool) -> None:
    """A picture of a page in a window of a size."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("screenshots need Chromium on PATH")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--blink-settings=preferredColorScheme={int(not dark)}", "--virtual-time-budget=8000",
               f"--window-size={size[0]},{size[1]}", f"--screenshot={to}", url]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--speed", "1", "--output", to, "32", to], check=True)


def attention() -> kv.Kernel:
    """Decode attention over pages, which has shared memory and loops to show."""
    sys.path.insert(0, str(ROOT))
    static = importlib.import_module("bench.static")
    cases = importlib.import_module("bench.cases")
    return static.compiled(static.specialisation(next(r for r in cases.TABLE if r.name == "b64_c4k")))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "rms_norm_keys.html")
        run = ["--emulate", "--grid", "3x40", "--block", "4", "--arg", "gamma=64", "--arg", "epsilon=1e-5"]
        example = f"{ROOT / 'examples' / 'rms_norm_keys.py'}:rms_norm_keys"
        cli.main(["explain", example, "--target", "sm_90a", "--spec", SPEC, *run, "--html", str(page)])
        link = "#line=24&pass=plan-kv-access"
        shoot(page.as_uri() + link, IMAGES / "kernel-report-light.png", (1400, 900), False)
        page = attention().explain().save(Path(folder, "attention.html"))
        lower = "<style>header p, nav, #figures, #code, #passes, #parameters {display: none}</style></head>"
        page.write_text(page.read_text().replace("</head>", lower, 1))
        shoot(page.as_uri(), IMAGES / "kernel-report-dark.png", (1400, 1180), True)


if __name__ == "__main__":
    main()
