# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The on-disk compile cache and the environment variables it reads."""

import multiprocessing
import os
import stat
import warnings

import pytest

import kvarn as kv
from kvarn.artifact import bundle
from kvarn.compilation.disk_cache import CompileCache, cache_key, compile_cache
from kvarn.dialect import dtypes, layout
from kvarn.env import Environment, env
from kvarn.lowering.schedules import tuned

KEY = cache_key({"k": 1})


@pytest.fixture
def cache(tmp_path):
    return CompileCache(tmp_path / "cache", 1 << 20)


def only_file(cache):
    [path] = cache.directory.iterdir()
    return path


def test_get_gives_what_put_stored(cache):
    assert cache.get(KEY) is None
    assert cache.put(KEY, b"payload")
    assert cache.get(KEY) == b"payload"
    assert CompileCache(cache.directory.parent, 1 << 20).get(KEY) == b"payload", "another process sees it"
    info = cache.info()
    assert (info.entries, info.hits, info.misses) == (1, 1, 1)
    assert info.bytes == only_file(cache).stat().st_size


@pytest.mark.parametrize("damage", [
    lambda p: p.write_bytes(p.read_bytes()[:-1]),
    lambda p: p.write_bytes(p.read_bytes() + b"x"),
    lambda p: p.write_bytes(b""),
    lambda p: p.write_bytes(b"something else entirely, and long enough to hold a header of this kind of file" * 2),
    lambda p: p.write_bytes(p.read_bytes().replace(b"payload", b"paylood")),
])  # fmt: skip
def test_damaged_entry_is_a_miss_and_goes_away(cache, damage):
    cache.put(KEY, b"payload")
    damage(only_file(cache))
    assert cache.get(KEY) is None
    assert not list(cache.directory.iterdir())


@pytest.mark.parametrize("make", [
    os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("nowhere", path),
])  # fmt: skip
def test_what_is_no_file_is_a_miss_at_once(cache, make):
    cache.put(KEY, b"payload")
    path = only_file(cache)
    path.unlink()
    make(path)
    assert cache.get(KEY) is None
    if make is os.mkdir:
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            assert not cache.put(KEY, b"payload")
    else:
        assert cache.put(KEY, b"payload")
        assert cache.get(KEY) == b"payload"
    assert cache.info().bytes < 1 << 20


def test_a_kernel_compiles_where_its_entry_is_a_fifo_or_nonsense_or_huge(tmp_path, monkeypatch):
    kernel = """module attributes {gpu.container_module} { gpu.module @kernels {
        gpu.func @f(%x: memref<?xf32, strided<[1]>, 1>) kernel { gpu.return } } }"""
    monkeypatch.setenv("KVARN_CACHE_DIR", str(tmp_path))
    wanted = kv.compile(kernel, target="sm_80").asm["ptx"]
    [path] = (tmp_path / "compile-v2").iterdir()
    entry = path.read_bytes()
    for payload in (b"", b"no zip", bundle.dumps([]), b"PK\x05\x06" + bytes(18)):
        compile_cache.put(path.stem, payload)
        with pytest.warns(RuntimeWarning, match=f"{path.name} of the compile cache is compiled again: it "):
            assert kv.compile(kernel, target="sm_80").asm["ptx"] == wanted
        assert path.read_bytes() == entry, "and kept"
    path.unlink()
    os.mkfifo(path)
    assert kv.compile(kernel, target="sm_80").asm["ptx"] == wanted
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # of which nothing is there
    assert kv.compile(kernel, target="sm_80").asm["ptx"] == wanted
    assert path.read_bytes() == entry
    os.mkfifo(tmp_path / "tune.json")
    assert tuned.digest() == ""
    assert not tuned.load(tmp_path / "tune.json")


def test_folders_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        cache = CompileCache(tmp_path / "a" / "b")
        cache.put(KEY, b"payload")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (cache.directory.parent, cache.directory, only_file(cache))]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_by_name(cache, mode):
    cache.put(KEY, b"payload")
    cache.directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"must be a folder that belongs to you .* mode {mode:04o}.* chmod 700"):
        assert cache.get(KEY) is None
    assert cache.get(KEY) is None, "and says so once"
    assert not cache.put(KEY, b"payload")
    cache.directory.chmod(0o755)
    assert cache.get(KEY) == b"payload"


def test_a_folder_or_an_entry_of_another_user_is_refused(cache, monkeypatch):
    cache.put(KEY, b"payload")
    path, me = only_file(cache), os.geteuid() or 1000
    os.chown(cache.directory, me, -1)
    os.chown(path, me, -1)
    monkeypatch.setattr(os, "geteuid", lambda: me)
    assert cache.get(KEY) == b"payload"
    path.chmod(0o666)
    assert cache.get(KEY) is None, "others may write to it"
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, me + 1, -1)
        assert cache.get(KEY) is None, "it is another user's"
        os.chown(path, 0, -1)
        assert cache.get(KEY) == b"payload", "root may do everything anyway"
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match=f"got owner {me} "):
        assert cache.get(KEY) is None


def test_fetch_makes_once(cache):
    made = []
    for _ in range(3):
        assert cache.fetch({"a": 1}, lambda: made.append(1) or b"x") == b"x"
    assert len(made) == 1
    with env.override(always_compile=True):
        cache.fetch({"a": 1}, lambda: made.append(1) or b"y")
    assert len(made) == 2
    assert cache.get(cache_key({"a": 1})) == b"y"


def test_least_recently_used_goes_first(tmp_path):
    cache = CompileCache(tmp_path, 10_000)
    keys = [cache_key({"i": i}) for i in range(5)]
    for age, key in enumerate(keys[:4]):
        cache.put(key, bytes(2400))
        os.utime(cache.directory / f"{key}.entry", (1000 + age, 1000 + age))
    assert cache.get(keys[0]) is not None  # now the youngest
    cache.put(keys[4], bytes(2400))
    left = [i for i, k in enumerate(keys) if (cache.directory / f"{k}.entry").exists()]
    assert left == [0, 3, 4]
    assert cache.info().bytes <= 8000


def test_an_entry_over_the_limit_stays_until_the_next(tmp_path):
    cache = CompileCache(tmp_path, 1000)
    assert cache.put(KEY, bytes(5000))
    assert cache.get(KEY) == bytes(5000)
    cache.put(cache_key({"k": 2}), b"small")
    assert cache.get(KEY) is None
    assert not CompileCache(tmp_path / "off", 0).put(KEY, b"x"), "limit 0 turns it off"


def test_entries_are_counted_where_they_may_exceed_the_limit_and_not_at_every_write(tmp_path, monkeypatch):
    cache, other, counts = CompileCache(tmp_path, 100_000), CompileCache(tmp_path, 100_000), []
    monkeypatch.setattr(cache, "_files", lambda: counts.append(1) or CompileCache._files(cache))
    for n in range(400):  # each process fills a part of what is free
        (cache if n % 2 else other).put(cache_key({"n": n}), bytes(1000))
        assert cache.info().bytes <= 100_000
    assert 10 < len(counts) - 400 < 150  # info() counts, too


def test_clear_removes_entries_and_nothing_else(cache):
    cache.put(KEY, b"x")
    (cache.directory / "notes.txt").write_text("mine")
    assert cache.clear() == 1
    assert [p.name for p in cache.directory.iterdir()] == ["notes.txt"]
    assert cache.clear() == 0


def test_unwritable_folder_warns_once_and_works_on(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file", 1000)
    with pytest.warns(RuntimeWarning, match="KVARN_CACHE_DIR"):
        assert cache.fetch({"a": 1}, lambda: b"x") == b"x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.fetch({"a": 1}, lambda: b"x") == b"x"


def _hammer(directory, seed, limit):
    cache = CompileCache(directory, limit)
    bad = 0
    for i in range(150):
        n = (i * 7 + seed) % 20
        key = cache_key({"n": n})
        found = cache.get(key)
        bad += found is not None and found != bytes([n]) * 1000
        cache.put(key, bytes([n]) * 1000)
        if i % 50 == 49 and seed == 0:
            cache.clear()
    return bad


@pytest.mark.parametrize("limit", [pytest.param(1 << 20, marks=pytest.mark.thorough), 6000])
def test_many_processes_never_see_half_an_entry(tmp_path, limit):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.starmap(_hammer, [(tmp_path, seed, limit) for seed in range(4)])
    assert results == [0, 0, 0, 0]
    assert not [p for p in CompileCache(tmp_path).directory.iterdir() if p.name.startswith(".new-")]


def test_key_depends_on_every_part_and_not_on_order():
    spec = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    options = {"a": 1, "b": [1, 2]}
    base = {"spec": spec, "dtype": dtypes.f32, "text": "x", "options": options, "code": b"z", "none": None}
    keys = {cache_key(base)}
    for name, other in [
        ("spec", layout.spec_of("paged", "bf16", 8, 128, page_size=32)), ("dtype", dtypes.f16), ("text", "y"),
        ("options", {"a": 1, "b": [2, 1]}), ("code", b"zz"), ("none", False), ("none", 0), ("none", "None"),
        ("text", b"x"),
    ]:  # fmt: skip
        keys.add(cache_key({**base, name: other}))
    assert len(keys) == 10
    assert cache_key(dict(reversed(base.items()))) == cache_key(base)


def test_foreign_keys_are_refused(cache):
    for key in ("", "../../etc/passwd", "A" * 64):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            cache.get(key)
    with pytest.raises(TypeError, match=r"got object at key\.a\[1\]"):
        cache_key({"a": [1, object()]})
    cache.put(KEY, b"payload")
    other = cache_key({"k": 2})
    only_file(cache).rename(cache.directory / f"{other}.entry")
    assert cache.get(other) is None, "an entry under another name"


# --- environment ---------------------------------------------------------------------------------


def test_variables_are_read_when_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("KVARN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVARN_CACHE_SIZE", "3M")
    cache = CompileCache()
    assert cache.directory.parent == tmp_path
    assert cache.limit == 3 << 20
    monkeypatch.setenv("KVARN_CACHE_SIZE", "")
    assert cache.limit == Environment.cache_size.default == 1 << 30
    with env.override(cache_size=5):
        assert cache.limit == 5
    assert cache.limit == 1 << 30


@pytest.mark.parametrize(("name", "attribute", "text"), [
    ("KVARN_CACHE_SIZE", "cache_size", "plenty"), ("KVARN_CHECK", "check", "perhaps"),
])  # fmt: skip
def test_bad_values_name_the_variable(monkeypatch, name, attribute, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} must be .*got '{text}'"):
        getattr(env, attribute)
