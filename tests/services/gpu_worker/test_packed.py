"""Packed weights on disk: found by what they depend on, shared, bounded, never in the way."""

import fcntl
import multiprocessing
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from services.gpu_worker.loader import source as source_module
from services.gpu_worker.loader.packed import PackedCache
from services.gpu_worker.loader.source import CODE, ROOT, Source

KEPT = 1 << 20  # bytes: all that a test packs, unless it says otherwise


class Packing:
    """What packs: new arrays each time."""

    def __init__(self, size=1000):
        self.size = size
        self.times = 0

    def __call__(self):
        self.times += 1
        return {"weights": np.full(self.size, self.times, dtype=np.int8)}


@pytest.fixture
def model(tmp_path):
    """A model file; what is in it is nobody's affair here."""
    return written(tmp_path / "model.gguf", b"some weights")


@pytest.fixture
def cache(tmp_path):
    return PackedCache(tmp_path / "cache" / "packed", KEPT, wait_s=0)


def written(path, content):
    path.write_bytes(content)
    return path


def names(cache):
    return sorted(path.suffix for path in cache.folder.iterdir())


# --- found or packed --------------------------------------------------------------------------


def test_the_first_packs_and_the_next_maps(cache, model):
    pack = Packing()
    first, second = (cache.load(Source.of(model), pack) for _ in range(2))
    assert pack.times == 1
    assert first["weights"].tobytes() == second["weights"].tobytes() == b"\1" * 1000
    assert names(cache) == [".packed"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda _: b"",
        lambda whole: whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        lambda whole: whole.replace(b"arrays 1", b"arrays 2"),
    ],
    ids=["truncated", "empty", "flipped", "version"],
)
def test_a_damaged_file_is_packed_anew(cache, model, damage):
    pack = Packing()
    cache.load(Source.of(model), pack)
    [file] = cache.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert cache.load(Source.of(model), pack)["weights"][0] == 2
    assert names(cache) == [".packed"]


def test_the_file_of_another_model_under_this_name_is_packed_anew(cache, model, tmp_path):
    pack = Packing()
    cache.load(Source.of(model), pack)
    [file] = cache.folder.iterdir()
    other = Source.of(written(tmp_path / "other.gguf", b"other weights"))
    file.rename(file.with_stem(other.key()))
    assert cache.load(other, pack)["weights"][0] == 2


# --- what it depends on -----------------------------------------------------------------------


def test_a_copy_is_the_same_model(model, tmp_path):
    copy = shutil.copy(model, tmp_path / "copy.gguf")
    os.utime(copy, (0, 0))
    assert Source.of(Path(copy)).key() == Source.of(model).key()


def test_other_content_is_another_model_whatever_its_size_and_times(model):
    key, times = Source.of(model).key(), (model.stat().st_atime_ns, model.stat().st_mtime_ns)
    written(model, b"some Weights")
    os.utime(model, ns=times)
    assert Source.of(model).key() != key


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "b.safetensors"])
def test_every_file_that_is_loaded_of_a_directory_counts(tmp_path, name):
    for file in ("config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"):
        written(tmp_path / file, b"as it was")
    key = Source.of(tmp_path).key()
    written(tmp_path / "README.md", b"no part of the model")
    assert Source.of(tmp_path).key() == key
    written(tmp_path / name, b"as it is!")
    assert Source.of(tmp_path).key() != key


@pytest.mark.parametrize("pattern", CODE)
def test_the_code_counts(model, tmp_path, monkeypatch, pattern):
    """Each file that reads or packs: a change of it makes other keys."""
    files = [file for each in CODE for file in sorted(ROOT.glob(each))]
    for file in files:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    monkeypatch.setattr(source_module, "ROOT", tmp_path)
    keys = {Source.of(model).key()}
    changed = sorted(tmp_path.glob(pattern))
    for file in changed:
        written(file, file.read_bytes() + b"\n")
        keys.add(Source.of(model).key())
    assert len(keys) == 1 + len(changed) > 1


def test_a_model_that_changes_while_it_is_packed_is_not_kept(cache, model):
    """Nor is one that has changed since its files were looked at."""
    looked = Source.of(model)

    def pack():
        written(model, b"new weights!")
        return Packing()()

    cache.load(looked, pack)
    cache.load(looked, Packing())
    assert names(cache) == []


# --- bounded ----------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first_and_stays_for_who_has_it(cache, tmp_path):
    small = cache._replace(bytes_max=2500)
    sources = [Source.of(written(tmp_path / f"{i}.gguf", bytes([i]))) for i in range(3)]
    packs = [Packing() for _ in sources]
    held = []
    for used, number in enumerate((0, 1, 0, 2)):
        held.append(small.load(sources[number], packs[number]))
        os.utime(small.folder / f"{sources[number].key()}.packed", (used, used))
    assert len(names(small)) == 2
    for number in (0, 2, 1):
        small.load(sources[number], packs[number])
    assert [pack.times for pack in packs] == [1, 2, 1]
    assert all(arrays["weights"][999] == 1 for arrays in held)


@pytest.mark.parametrize("bytes_max", [0, 999])
def test_what_is_larger_than_the_cache_is_not_kept(cache, model, bytes_max):
    assert cache._replace(bytes_max=bytes_max).load(Source.of(model), Packing())
    assert not cache.folder.exists() or names(cache) == []


def test_what_a_killed_one_left_is_removed(cache, model):
    cache.folder.mkdir(parents=True)
    written(cache.folder / "abandoned.draft", b"half a file")
    cache.load(Source.of(model), Packing())
    assert names(cache) == [".packed"]


# --- never in the way -------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_no_failure(cache, model, tmp_path):
    written(tmp_path / "cache", b"a file where the folder is to be")
    assert cache.load(Source.of(model), Packing())["weights"][0] == 1


def test_a_write_that_fails_half_way_is_no_failure(cache, model):
    """And leaves nothing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        arrays = cache.load(Source.of(model), Packing(1 << 19))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert arrays["weights"].nbytes == 1 << 19
    assert names(cache) == []


def test_a_model_that_cannot_be_packed_leaves_nothing(cache, model):
    def pack():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.load(Source.of(model), pack)
    assert names(cache) == []


def test_who_waits_too_long_packs_for_itself(cache, model):
    """And leaves the other's draft alone."""
    cache.folder.mkdir(parents=True)
    draft = written(cache.folder / f"{Source.of(model).key()}.draft", b"half a file")
    with draft.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cache.load(Source.of(model), Packing())["weights"][0] == 1
    assert draft.read_bytes() == b"half a file"
    assert names(cache) == [".draft"]


# --- shared -----------------------------------------------------------------------------------

SHARED_KB = 32 << 10


def worker(model, folder, pipe):
    """Load when told to; say whether it packed; end when told to."""
    pack = Packing(SHARED_KB << 10)
    pipe.recv()
    arrays = PackedCache(folder, 1 << 30).load(Source.of(model), pack)
    pipe.send((pack.times, int(arrays["weights"][-1])))
    pipe.recv()


def mapped_kb(pid, file, field):
    """Sum of `field` over the mappings of `file`."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and head == f"{field}:":
            total += int(rest.split()[0])
    return total


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # they use no lock of a thread
def test_workers_that_start_together_pack_once_and_share_one_copy(tmp_path, model):
    """Each has all of it resident; together they hold little more than one copy."""
    folder = tmp_path / "cache"
    fork = multiprocessing.get_context("fork")
    pipes, theirs = zip(*(fork.Pipe() for _ in range(3)), strict=True)
    workers = [fork.Process(target=worker, args=(model, folder, pipe)) for pipe in theirs]
    for process in workers:
        process.start()
    for pipe in pipes:
        pipe.send("load")
    said = sorted(pipe.recv() for pipe in pipes)
    [file] = folder.iterdir()
    shares = [mapped_kb(process.pid, file, "Pss") for process in workers]
    resident = [mapped_kb(process.pid, file, "Rss") for process in workers]
    for process, pipe in zip(workers, pipes, strict=True):
        pipe.send("end")
        process.join()
    assert said == [(0, 1), (0, 1), (1, 1)]
    assert min(resident) >= SHARED_KB
    assert sum(shares) < 1.05 * SHARED_KB
