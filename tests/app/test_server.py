from __future__ import annotations

import stat
from pathlib import Path

from app.server import _salts
from app.settings import Settings


def test_salts_are_an_owners_own_and_last_as_long_as_the_data(tmp_path: Path) -> None:
    """E3: nobody can choose or guess another's root, and a restart finds it again."""
    one, other = Settings(data_dir=tmp_path / "one"), Settings(data_dir=tmp_path / "other")
    salt = _salts(one)
    assert salt("ana") == _salts(one)("ana")
    assert len({salt("ana"), salt("ben"), _salts(other)("ana"), _salts(Settings(store="memory"))("ana")}) == 4
    assert stat.S_IMODE((tmp_path / "one" / "secret").stat().st_mode) == 0o600


def test_where_the_log_is_in_memory_salts_last_as_long_as_the_kv_outside_it(tmp_path: Path) -> None:
    """Else what `--offload-dir` keeps could not be found again."""
    kept = Settings(store="memory", offload_dir=tmp_path / "kv")
    assert _salts(kept)("ana") == _salts(kept)("ana") != _salts(Settings(store="memory", offload_dir=tmp_path / "other"))("ana")
    assert stat.S_IMODE((tmp_path / "kv" / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
