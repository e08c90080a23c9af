"""The command that installs an extra is one that works: by name from a wheel, by folder from a clone."""

from __future__ import annotations

import pathlib

import pytest

from jaxrl_llm.config import extras

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('inside', [True, False])
def test_a_clone_is_installed_from_its_folder(inside, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT if inside else tmp_path)
  assert extras.install('gym') == f"pip install -e '{'.' if inside else ROOT}[gym]'"


def test_a_wheel_is_installed_by_name(tmp_path, monkeypatch):
  monkeypatch.setattr(extras, '_ROOT', tmp_path)
  assert extras.install('gym') == "pip install 'jaxrl-llm[gym]'"
