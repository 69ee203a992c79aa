# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What all tests share: the gpu marker, a private compile cache, and no run that tested nothing."""

import collections
import faulthandler
import functools
import gc
import os
import zlib
from typing import Any

import pytest

_STDERR = pytest.StashKey[int]()  # as it was before pytest captured it
# One in so many cases of a suite of operations runs as GPU code in the interpreter, and on the host; of the cases of
# any other test that has more than MANY, one in OF_MANY.
INTERPRETED, HOSTED, MANY, OF_MANY = 8, 8, 8, 6
FIRST = ("test_lint.py", "test_lit.py")  # files of pyright and of lit
OF_PROCESSES = 8  # as many others a test takes of a file that starts processes
SECONDS = "kvarn/seconds"  # in pytest's cache: how long the tests of each file took
GPU_SECONDS = 120  # that a test on a GPU may take: a kernel that hangs takes everything after it along


@functools.cache
def _no_gpu() -> str:
    """Why GPU tests cannot run here; empty when they can."""
    try:
        from kvarn.runtime import driver
    except ImportError as error:
        return f"kvarn.runtime.driver cannot be imported: {error}"
    status = driver.status()
    return "" if status.usable else status.reason


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and _no_gpu():
        pytest.skip(f"needs a GPU: {_no_gpu()}")


def _seconds(config):
    return config.cache.get(SECONDS, {}) if hasattr(config, "cache") else {}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """The workers of a distributed run order the files alike, also if another run ends meanwhile."""
    node.workerinput["seconds"] = _seconds(node.config)


def pytest_collection_modifyitems(config, items):
    _sample(config, items)
    # Files go to workers in this order (make check: --no-loadscope-reorder), so that no worker has a long file left
    # when the other is done: what is long and one test, then by the seconds of the last run, or by the number of tests.
    sizes = collections.Counter[Any]()
    for item in items:
        sizes[item.path] += OF_PROCESSES if hasattr(getattr(item, "module", None), "subprocess") else 1
    seconds = config.workerinput["seconds"] if hasattr(config, "workerinput") else _seconds(config)

    def place(item):
        file = item.nodeid.partition("::")[0]
        return (item.path.name not in FIRST, -seconds.get(file, sizes[item.path]), item.path)

    items.sort(key=place)


def _sample(config, items):
    """Of the cases of a sampled test one in n by its name's hash, and the first: the suite has to end in minutes."""
    if os.environ.get("KVARN_TEST_ALL") or any("::" in argument for argument in config.args):
        return
    seen, left = set(), []
    cases = collections.Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            left.append(item)
            continue
        if item.get_closest_marker("whole") is not None:
            continue
        marker = item.get_closest_marker("sampled")
        name = item.nodeid.partition("[")[0]
        # Not the checks of the whole tree, beside this file: lit's files, those of pyright, the rules of its structure.
        here = item.path.parent.name not in ("tests", "gpu", "pytorch")
        placed = here and "place" in getattr(item, "fixturenames", ())
        interpreted = placed and "[sm_90a" in item.nodeid
        if marker is not None or placed or (here and cases[name] > MANY):
            usual = INTERPRETED if interpreted else HOSTED if placed else OF_MANY
            one_in = marker.args[0] if marker is not None else usual
            test = name + "[sm_90a" * interpreted
            if test in seen and zlib.crc32(item.nodeid.encode()) % one_in:
                left.append(item)
            seen.add(test)
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session):
    """What is there before the first test stays to the end: collections, a tenth of the time, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _collects_its_own(request):
    """A test that collects garbage looks at what it made, not at all that its process holds: that takes a second."""
    if hasattr(request.node, "module") and hasattr(request.node.module, "gc"):
        gc.freeze()


@pytest.fixture(autouse=True)
def _ends_on_a_gpu(request):
    """A test whose kernel does not end prints where it waits, and ends the process: no call would come back."""
    watched = request.node.get_closest_marker("gpu") is not None
    if watched:
        faulthandler.dump_traceback_later(GPU_SECONDS, exit=True, file=request.config.stash[_STDERR])
    yield
    if watched:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory):
    """Tests neither use nor fill the user's compile cache; the workers of a distributed run share one."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kvarn-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVARN_CACHE_DIR", str(folder))
        if "KVARN_HOST_OPT" not in os.environ and not os.environ.get("KVARN_TEST_ALL"):
            patch.setenv("KVARN_HOST_OPT", "0")  # kernels run once: tests/ops/test_host_code.py compares the levels
        yield


@pytest.fixture(params=["host", "sm_90a"])
def place(request):
    """Where a suite runs: on the host, and as a GPU's code in the interpreter; on a GPU, see tests/gpu/conftest.py."""
    from reference.places import Guarded, Interpreted

    found = Guarded() if request.param == "host" else Interpreted(request.param)
    with found.active():
        yield found


class _Outcomes:
    """Counts what happened and how long it took; in a distributed run the reports arrive in the controlling process."""

    def __init__(self, config):
        self.config = config
        self.ran = self.skipped = 0
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:  # at once: a run that is stopped has no summary
            reporter.write_line(f"\n{report.nodeid} failed", red=True)
        if report.skipped:
            self.skipped += 1
        elif report.when == "call" or report.failed:
            self.ran += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if len(self.seconds) > MANY and hasattr(session.config, "cache"):  # of more than some files that were picked
            session.config.cache.set(
                SECONDS, _seconds(session.config) | {file: round(s, 1) for file, s in self.seconds.items()}
            )
        if self.skipped and not self.ran and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.skipped and not self.ran:
            terminalreporter.write_line("every test was skipped: nothing was tested", red=True)


def pytest_configure(config):
    config.stash[_STDERR] = os.dup(2)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config), "kvarn-outcomes")
