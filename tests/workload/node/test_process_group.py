"""Ranks that find a socket of rank 0 by the store of their process group."""

from __future__ import annotations

import pytest

from tuner.online.agent import publish, published
from tuner.search_spaces.errors import InputError


def test_an_address_is_found_on_its_node_alone_and_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = pytest.importorskip("torch.distributed").HashStore()
    assert published(store, "tuning/0", 0.1) == ""
    publish(store, "tuning/0", "/tmp/a folder/agent")
    assert published(store, "tuning/0", 0.1) == "/tmp/a folder/agent"
    monkeypatch.setattr("tuner.online.agent._machine", lambda: "another")
    with pytest.raises(InputError, match="of one node"):
        published(store, "tuning/0", 0.1)
