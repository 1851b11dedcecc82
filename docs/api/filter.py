"""A header on its way to Doxygen: its ordinary comments become ones that Doxygen reads.

A comment above a declaration belongs to it, one behind a declaration too, and the first one is about the file. Comments
inside of functions, captions and instructions for tools stay what they are.
"""

import re
import sys
from pathlib import Path


def line(text: str) -> str:
    text = re.sub(r" *// (NOLINT|namespace).*", "", text)
    if re.match(r" {0,4}/[/*]( |$)", text):
        return re.sub(r"//|/\*", lambda opening: opening[0] + opening[0][-1], text, count=1)
    if re.match(r" *(//|\*)", text):
        return text
    return re.sub(r" +(/[/*]) ", lambda opening: f" {opening[1]}{opening[1][-1]}< ", text, count=1)


def filtered(text: str) -> str:
    text = re.sub(r"([@\\])(?=\w)", r"\\\1", text)  # Doxygen takes a word after @ or \ for a command
    text = re.sub(r"(/[/*]) >", r"\1 \\>", text)  # and > at the start for a quotation
    text = re.sub(r"\A(//|/\*) ", lambda first: f"{first[1]} @file\n{first[1].replace('/*', ' *')} ", text)
    text = re.sub(r"// -{20,}\n// .*\n", "", text)
    return "\n".join(map(line, text.split("\n")))


if __name__ == "__main__":
    sys.stdout.write(filtered(Path(sys.argv[1]).read_text()))
