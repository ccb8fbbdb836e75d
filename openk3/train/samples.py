"""Completions that show what a run has learnt: prompts from held-out files, and whether what comes back is Python."""

import ast
import io
import tokenize

CONTINUES = {"except", "finally", "else", "elif"}


def code_prompts(documents: list[tuple[str, str]], count: int, longest: int = 1200) -> list[str]:
    """The first lines of held-out documents, each cut behind a line that opens a function, class or loop, at most `longest` characters.

    documents: (path, text). Prompts are spread over the documents; one without such a line gives its first lines.
    """
    prompts = []
    for _, text in documents:
        lines, used, cut = text.splitlines(keepends=True), 0, 0
        for line in lines:
            used += len(line)
            if used > longest:
                break
            if line.rstrip().endswith(":") and line.lstrip().startswith(("def ", "class ", "for ", "if ", "async def ")):
                cut = used
        if cut or lines:
            prompts.append(text[:cut] if cut else text[:longest][: text[:longest].rfind("\n") + 1] or text[:80])
    step = max(1, len(prompts) // max(1, count))
    return prompts[::step][:count]


def parses_as_python(text: str) -> bool:
    """Does `text`, which a length limit may have cut anywhere, parse as Python up to its last whole statement?

    Only what the cut left unfinished is forgiven: the last logical line (an open string or bracket counts as one), a header
    whose body hasn't come, a `try` whose handler hasn't come.
    """
    lines = _logical_lines(text if text.endswith("\n") else text[: text.rfind("\n") + 1])
    if lines is None:
        return False
    while lines and lines[-1][1].startswith("@"):
        lines.pop()                                                     # a decorator alone decorates nothing yet
    if not lines:
        return False
    source = "".join(raw for _, _, raw in lines)
    indent, last, _ = lines[-1]
    if last.endswith(":"):
        source += f"{' ' * indent}    pass\n"
    open_tries: list[int] = []
    for indent, line, _ in lines:
        word = line.split(maxsplit=1)[0].rstrip(":")
        while open_tries and (open_tries[-1] > indent or (open_tries[-1] == indent and word not in {"except", "finally"})):
            open_tries.pop()
        if open_tries and open_tries[-1] == indent:
            open_tries.pop()
        if word == "try":
            open_tries.append(indent)
    for indent in reversed(open_tries):
        source += f"{' ' * indent}finally:\n{' ' * indent}    pass\n"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _logical_lines(source: str) -> list[tuple[int, str, str]] | None:
    """(indentation, text without comment, raw lines) of each finished logical line; None where the tokens are broken."""
    physical = source.splitlines(keepends=True)
    found: list[tuple[int, str, str]] = []
    start, words, indent, first = 0, [], 0, True
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                continue
            if token.type == tokenize.NEWLINE:
                end = token.end[0]
                raw = "".join(physical[start:end])
                if words:
                    found.append((indent, " ".join(words), raw if raw.endswith("\n") else raw + "\n"))
                start, words, first = end, [], True
                continue
            if token.type == tokenize.ERRORTOKEN and token.string.strip():
                return None
            if first:
                indent, first = token.start[1], False
            words.append(token.string)
    except tokenize.TokenError:
        pass                                                            # the end came inside a string or bracket
    except (IndentationError, SyntaxError):
        return None
    return found
