from collections.abc import Callable

import pytest

from agentspec.cache import SuffixCache, native_available

MakeCache = Callable[..., SuffixCache]


@pytest.fixture(params=["native", "plain"])
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    """Builds a SuffixCache on each of the two cores in turn."""
    native = request.param == "native"
    if native and not native_available():
        pytest.skip("the compiled core is not built")

    def make(**options: object) -> SuffixCache:
        return SuffixCache(native=native, **options)  # type: ignore[arg-type]

    return make
