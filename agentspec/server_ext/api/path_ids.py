"""Take the id at the end of a route's path, whatever characters it has."""

from starlette.convertors import Convertor, register_url_convertor

_NAME = "agentspec_id"


def any_id(parameter: str) -> str:
    """Return the end of a route's path that gives the rest of the path to this parameter of the handler."""
    return f"{{{parameter}:{_NAME}}}"


class _IdConvertor(Convertor[str]):
    """Match slashes and line breaks, too.

    Starlette's own ``path`` drops a line break at the end of a path, so that the id would be another one's. It doesn't
    match one before the end, so that there would be no such route.
    """

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """Return the id."""
        return value

    def to_string(self, value: str) -> str:
        """Return the end of a path that has this id."""
        return value


register_url_convertor(_NAME, _IdConvertor())
