"""Take the id at the end of a route's path, whatever characters it has."""

from starlette.convertors import Convertor, register_url_convertor

_NAME = "agentspec_id"


def any_id(parameter: str) -> str:
    """Return the end of a route's path that passes the rest of a path to this parameter of the handler."""
    return f"{{{parameter}:{_NAME}}}"


class _IdConvertor(Convertor[str]):
    """Match any text, also with slashes and line breaks.

    Starlette's own ``path`` drops a line break at the end of a path, which would make it another id. It matches no line
    break before the end, so no route would be found.
    """

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """Return the id."""
        return value

    def to_string(self, value: str) -> str:
        """Return the end of a path that has this id."""
        return value


register_url_convertor(_NAME, _IdConvertor())
