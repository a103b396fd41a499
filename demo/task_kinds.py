"""List the parts of a task: words for names, kinds of functions, and edge cases."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = (
    "amber bold brave brisk calm clean clear cold cool coral crisp dark deep dense dry dusty early east "
    "even fair fast fine firm flat fresh full gold grand gray green happy hazel ideal iron ivory jade "
    "keen kind large late lemon light lilac lime lucky magic major mild mint misty modern navy neat new "
    "noble north odd olive open pale pearl pink plain prime proud pure quick quiet rapid red rich rose "
    "royal rust sage sandy sharp shy silk silver smart soft solid south stone sweet swift tall tidy "
    "vast velvet warm west white "
)
_SECOND = (
    "acorn anchor apple arrow badge barn basket beacon bell berry bird board boat bridge brook bucket "
    "cabin candle card castle cedar chain chart cloud coat comet crane creek crown cup desk dome door "
    "drum eagle ember engine falcon farm feather fern field flag flame forest fox garden gate glove "
    "grain harbor hat hill horn house island jar kite ladder lake lamp leaf lion map maple meadow mill "
    "mirror moon nest oak ocean orbit otter panda path petal pilot pine planet pond raven reef ridge "
    "river robin rocket sail seed shell ship signal spark star storm table tiger tower trail valley "
    "wagon whale wheel wolf "
)
LITERAL_WORDS = ("ab", "cd", "ef", "gh", "tea", "oak", "sun", "sky", "map", "ink")
FIRST_WORDS = tuple(_FIRST.split())
SECOND_WORDS = tuple(_SECOND.split())


@dataclass(frozen=True)
class Family:
    """Describe a kind of function: its first lines, its steps for each entry, and its summaries."""

    element: str  # "num" or "str": type of the input list's entries
    result: str  # "num" or "list": type of the result
    param: str  # "num" or "str"
    start: str
    steps: tuple[str, ...]
    summaries: tuple[str, str]

    def kinds(self) -> tuple[str, str, str]:
        """Return the values of ``Rule.needs`` that this family meets."""
        return ("", f"{self.element} in", f"{self.result} out")


# {a} is the list, {p} the second argument, {r} the result, {e} the loop variable.
FAMILIES = (
    Family("num", "num", "num", "0", ("if {e} > {p}:", "    {r} += {e}"),
            ("Add up the values in {a} above {p}.", "Sum every value of {a} that is more than {p}.")),
    Family("num", "num", "num", "0", ("if {e} % {p} == 0:", "    {r} += 1"),
            ("Count the values in {a} that {p} divides.",
             "Tell how many values of {a} are multiples of {p}.")),
    Family("num", "list", "num", "[]", ("{r}.append({e} * {p})",),
            ("Multiply each value in {a} by {p}.", "List the values of {a}, scaled by {p}.")),
    Family("num", "list", "num", "[]", ("{r}.append({e} + {p})",),
            ("Add {p} to each value in {a}.", "List the values of {a}, shifted by {p}.")),
    Family("num", "list", "num", "[]", ("{r}.append(abs({e} - {p}))",),
            ("Find the distance of each value in {a} from {p}.",
             "List how far the values of {a} are from {p}.")),
    Family("num", "num", "num", "{p}", ("if {e} > {r}:", "    {r} = {e}"),
            ("Find the largest value among {p} and {a}.", "Return the maximum of {a}, but at least {p}.")),
    Family("num", "list", "num", "[]", ("if {e} > {p}:", "    {r}.append({e})"),
            ("Keep the values in {a} above {p}.", "List every value of {a} that is more than {p}.")),
    Family("num", "num", "num", "{p}", ("{r} += {e}",),
            ("Add up the values in {a}, starting from {p}.", "Return {p} plus the sum of {a}.")),
    Family("str", "list", "str", "[]", ("{r}.append({p} + {e})",),
            ("Put {p} in front of each word in {a}.", "List the words of {a} with the prefix {p}.")),
    Family("str", "num", "num", "0", ("if len({e}) > {p}:", "    {r} += 1"),
            ("Count the words in {a} longer than {p}.",
             "Tell how many words of {a} have more letters than {p}.")),
    Family("str", "list", "str", "[]", ("if {p} in {e}:", "    {r}.append({e})"),
            ("Keep the words in {a} that contain {p}.", "List every word of {a} with {p} inside.")),
    Family("str", "list", "num", "[]", ("{r}.append({e} * {p})",),
            ("Repeat each word in {a} {p} times.", "List the words of {a}, each written {p} times.")),
    Family("str", "list", "num", "[]", ("{r}.append(len({e}) + {p})",),
            ("Add {p} to the length of each word in {a}.", "List the word lengths of {a}, each plus {p}.")),
    Family("str", "num", "str", "0", ("{r} += {e}.count({p})",),
            ("Count how often {p} is in the words of {a}.", "Total the uses of {p} over all words of {a}.")),
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Describe an edge case: the place of its lines, the lines, and the text of the failing test."""

    slot: str  # place of the lines: "before", "loop" or "after"
    lines: tuple[str, ...]
    names: tuple[str, str]
    texts: tuple[str, str]
    needs: str = ""  # a value of ``Family.kinds``


# {k} is a small number. The rules' lines stand in this order in the finished function.
RULES = (
    Rule("before", ("if {p} is None:", "    {p} = {d}"), ("no_second", "default_second"),
          ("without {p}, use {d}", "{p} defaults to {d}")),
    Rule("before", ("if {a} is None:", "    return {v}"), ("none_input", "missing_input"),
          ("None as input gives {v}", "for None the answer is {v}")),
    Rule("before", ("if len({a}) == 0:", "    return {v}"), ("empty_input", "empty_list"),
          ("an empty list gives {v}", "for an empty list the answer is {v}")),
    Rule("loop", ("if {e} is None:", "    continue"), ("none_entry", "skip_none"),
          ("None entries are skipped", "leave out None entries")),
    Rule("loop", ("if isinstance({e}, str):", "    continue"), ("text_entry", "skip_text"),
          ("text entries are skipped", "leave out text entries"), "num in"),
    Rule("loop", ("if isinstance({e}, int):", "    continue"), ("number_entry", "skip_numbers"),
          ("number entries are skipped", "leave out number entries"), "str in"),
    Rule("loop", ("{e} = {e}.strip()",), ("spaces", "strip_spaces"),
          ("spaces around words are removed", "strip the spaces of each word"), "str in"),
    Rule("loop", ("{e} = {e}.lower()",), ("upper_case", "any_case"),
          ("words are put in lower case", "upper case counts as lower case"), "str in"),
    Rule("loop", ("if {e} < 0:", "    continue"), ("negative", "below_zero"),
          ("negative values are skipped", "leave out values below zero"), "num in"),
    Rule("loop", ("if {e} > {k}:", "    {e} = {k}"), ("large_value", "cap_values"),
          ("values over {k} count as {k}", "no value counts for more than {k}"), "num in"),
    Rule("loop", ("if len({e}) < {k}:", "    continue"), ("short_word", "skip_short"),
          ("words shorter than {k} are skipped", "leave out words with less than {k} letters"), "str in"),
    Rule("after", ("if {r} > {k}:", "    {r} = {k}"), ("upper_limit", "at_most"),
          ("the result is at most {k}", "a result over {k} becomes {k}"), "num out"),
    Rule("after", ("{r} = list(dict.fromkeys({r}))",), ("repeats", "no_repeats"),
          ("each result is listed once", "repeated results are dropped"), "list out"),
    Rule("after", ("{r} = sorted({r})",), ("order", "sorted_result"),
          ("results are in ascending order", "sort the results"), "list out"),
    Rule("after", ("{r} = {r}[:{k}]",), ("many_results", "first_results"),
          ("only the first {k} results count", "at most {k} results are listed"), "list out"),
)  # fmt: skip

OPENINGS = (
    "Write this Python function:",
    "Please implement this function:",
    "Complete this function for me:",
    "I need this function in Python:",
)
STUB = """```python
def {f}({a}, {p}):
    \"\"\"{summary}\"\"\"
```"""
NAMINGS = (
    "Name the result {r} and the loop variable {e}.",
    "Call the result {r} and each entry {e}.",
    "Use {r} for the result and {e} for each entry.",
)
