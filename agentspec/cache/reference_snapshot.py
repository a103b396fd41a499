"""Snapshots of the plain-Python core: what the compiled core's file holds (csrc/cache_snapshot.cpp), as msgpack.

The two cannot read each other's files: the compiled core maps its indexes as they are, these are rebuilt.
"""

import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgpack

from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference import ReferenceIndex
from agentspec.cache.reference_drafter import SESSION_BITS, TENANT_BITS
from agentspec.cache.reference_judge import Learned
from agentspec.cache.reference_state import Corpus, Document, Group, Holding, Session, Tenant

MAGIC = b"agentspec plain snapshot 1\n"

Contents = tuple[int, int, dict[str, Tenant], dict[str, Holding]]
"""Vocabulary, tick, tenants and holdings (least recently used first)."""


def write_snapshot(path: Path, contents: Contents) -> None:
    """Writes beside `path` and renames: the file is complete or not there. Raises OSError."""
    vocab_size, tick, tenants, holdings = contents
    names = {id(tenant): name for name, tenant in tenants.items()}
    packed: bytes = msgpack.packb(
        {
            "vocab_size": vocab_size,
            "tick": tick,
            "tenants": {
                name: {"used": tenant.used, "learned": _learned(tenant.learned), "corpus": _corpus(tenant.corpus)}
                for name, tenant in tenants.items()
            },
            "holdings": [
                [key, names[id(held.tenant)], _session(held) if isinstance(held, Session) else _corpus(held.corpus)]
                for key, held in holdings.items()
                if held.tokens
            ],
        }
    )
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(MAGIC + zlib.crc32(packed).to_bytes(4, "little") + packed)
    Path(file.name).replace(path)


def read_snapshot(path: Path, policy: DraftPolicy) -> Contents:
    """Raises OSError or RuntimeError that says what is wrong."""
    data = path.read_bytes()
    body = data[len(MAGIC) + 4 :]
    if not data.startswith(MAGIC):
        raise RuntimeError("not a snapshot of the plain-Python core, or of another version")
    if zlib.crc32(body).to_bytes(4, "little") != data[len(MAGIC) : len(MAGIC) + 4]:
        raise RuntimeError("the file is damaged: its checksum does not hold")
    packed: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    tenants = {}
    for name, of in packed["tenants"].items():
        tenants[name] = Tenant(
            _load_learned(policy, TENANT_BITS, of["learned"]), of["used"], _load_corpus(of["corpus"])
        )
    holdings: dict[str, Holding] = {}
    for key, owner, of in packed["holdings"]:
        tenant = tenants[owner]
        if key.startswith("s"):
            learned = _load_learned(policy, SESSION_BITS, of["learned"])
            holdings[key] = Session(key, tenant, learned, _load_index(of["index"]), of["last"])
        else:
            holdings[key] = Group(key, tenant, _load_corpus(of))
    return packed["vocab_size"], packed["tick"], tenants, holdings


def _index(index: ReferenceIndex) -> dict[str, Any]:
    return {"text": index.text, "indexed": sorted(index.indexed_positions())}


def _load_index(of: dict[str, Any]) -> ReferenceIndex:
    index = ReferenceIndex()
    index.load(of["text"], of["indexed"])
    return index


def _corpus(corpus: Corpus) -> dict[str, Any]:
    documents = [(document.session, document.begin, document.end) for document in corpus.documents]
    return {"documents": documents, "index": _index(corpus.index)}


def _load_corpus(of: dict[str, Any]) -> Corpus:
    corpus = Corpus(_load_index(of["index"]))
    corpus.documents.extend(Document(*fields) for fields in of["documents"])
    corpus.tokens = sum(document.end - document.begin for document in corpus.documents)
    return corpus


def _session(session: Session) -> dict[str, Any]:
    return {"last": session.last, "learned": _learned(session.learned), "index": _index(session.index)}


def _learned(learned: Learned | None) -> list[bytes]:
    return [learned.table.to_bytes(), learned.judge.to_bytes()] if learned else []


def _load_learned(policy: DraftPolicy, bits: int, data: list[bytes]) -> Learned | None:
    """What is of another size was learned under other settings: then learning starts anew."""
    if not data:
        return None
    learned = Learned(policy, bits)
    learned.table.load(data[0])
    learned.judge.load(data[1])
    return learned
