"""Group the requests that answer the same prompt, although they name no group.

Trainers sample one prompt many times and send no ids. A later turn continues a prompt that was seen, and joins that
prompt's group. The first request of a prompt is in no group, so a prompt that does not return costs the memory of a
hash, but none for its text.
"""

import hashlib
from collections import OrderedDict

from agentspec.cache import context_hashes
from agentspec.cache.arguments import TokenIds
from agentspec.cache.types import UInt64Array
from agentspec.errors import InvalidTokenError
from agentspec.server_ext.identity.identity import Identity

_MAX_LENGTHS = 256
_LONGEST = 32_768  # tokens; hashing longer prompts would take too much of a step
_LEAST_CONTINUED = 32  # tokens of a prompt that a later turn can be recognised by
_PROMPT_BYTES, _LENGTH_BYTES = 400, 150

_Prompt = tuple[str | None, str | None, int]  # tenant, principal, hash


class PromptGroups:
    """Name the groups of requests without ids. Remembers hashes of the prompts used last, and their lengths.

    max_bytes: most memory for these, roughly.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[_Prompt, int] = OrderedDict()  # the hash of its conversation's first prompt
        self._lengths: OrderedDict[int, None] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Return roughly how many bytes the remembered prompts take."""
        return len(self._prompts) * _PROMPT_BYTES + len(self._lengths) * _LENGTH_BYTES

    def group_of(self, identity: Identity, prompt: TokenIds) -> str | None:
        """Return the group of a request that starts: the one that it names, or else its prompt's; None: it has none.

        prompt: token ids, int32 [P] or a sequence of int.
        """
        named = identity.group is not None or identity.session is not None
        if named or identity.scope != "tenant" or not 0 < len(prompt) <= _LONGEST:
            return identity.group
        try:
            hashes = context_hashes(prompt)
        except InvalidTokenError:  # e.g. the placeholder of an image
            return None
        whole = (identity.tenant, identity.principal, int(hashes[-1]))
        root = self._prompts.get(whole)
        if root is None:
            root = self._continued(identity, hashes)
        self._note(whole, len(prompt), whole[2] if root is None else root)
        if root is None:
            return None
        owner = f"{identity.principal} {root:016x}"
        return hashlib.blake2b(owner.encode(), digest_size=16, person=b"prompt group").hexdigest()

    def _continued(self, identity: Identity, hashes: UInt64Array) -> int | None:
        """Return the hash of the first prompt of the conversation that a prompt continues; None: of no known one.

        hashes: uint64 [P], of the context after each of the prompt's tokens.
        """
        for length in sorted(self._lengths, reverse=True):
            if _LEAST_CONTINUED <= length < len(hashes):
                root = self._prompts.get((identity.tenant, identity.principal, int(hashes[length - 1])))
                if root is not None:
                    return root
        return None

    def _note(self, prompt: _Prompt, length: int, root: int) -> None:
        """Remember a prompt as the one used last. Beyond the limits, forget what was used longest ago."""
        self._prompts[prompt] = root
        self._prompts.move_to_end(prompt)
        self._lengths[length] = None
        self._lengths.move_to_end(length)
        if len(self._lengths) > min(_MAX_LENGTHS, len(self._prompts)):
            self._lengths.popitem(last=False)
        if self.bytes > self._max_bytes:
            self._prompts.popitem(last=False)
