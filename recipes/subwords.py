"""Tokenises text and splits it into subwords: Moses' words and BPE, or SentencePiece."""

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from .languages import lower, one_line
from .steps import UserError, dry_run, make, remove, show_step, whole
from .text import lines, write_lines

# ---- Moses' tokeniser
#
# Moses' tokeniser puts blanks around every character that is not a letter or digit in its own lists, which are older
# than many scripts, and its normaliser removes characters that are not printed. Raised digits (m²), combining accents,
# joined emoji and letters of newer scripts would not come back. Therefore each run of such characters is replaced by a
# stand-in while Moses reads a line: by a letter of Canadian Syllabics, which Moses knows, that the line does not have.

STAND_INS = [chr(code) for code in range(0x1401, 0x166D)]
VARIATION_SELECTOR = "\ufe0f"  # makes an emoji of a sign such as ©, which it then belongs to
# Symbols from enclosed letters and pictures (㊗, ☂) to emoji, and what emoji are composed of. Others (©, °, +, →) stay
# words of their own, as Moses has them.
PICTURES = "\u2300-\u23ff\u2460-\u24ff\u2600-\u27bf\u2b00-\u2bff\u3200-\u33ff\U0001f000-\U0001fbff\U000e0000-\U000e0fff"
JOINERS = "\u200c\u200d"
PRIVATE_USE = "\ue000-\uf8ff\U000f0000-\U0010ffff"
LAST_LETTER = 0x34000  # Unicode has no letters behind it


@functools.cache
def characters_to_keep() -> "re.Pattern[str]":
    """Returns a pattern for runs of characters that Moses would separate from their word or remove, and should not."""
    from sacremoses import MosesTokenizer

    known = re.compile(f"[{MosesTokenizer.IsAlnum}]")
    unknown: list[str] = []
    for code in range(0x80, LAST_LETTER):
        character = chr(code)
        is_word_character = unicodedata.category(character)[0] in "LMN"  # letters, marks and numbers
        if is_word_character and not known.match(character):
            unknown.append(character)
    kept = f"{JOINERS}{PRIVATE_USE}{PICTURES}{as_ranges(unknown)}"
    return re.compile(f"(?:\\S{VARIATION_SELECTOR}|[{kept}])+")


def as_ranges(characters: Sequence[str]) -> str:
    """Returns characters in ascending order as the inside of a character class: runs of them as ranges."""
    ranges: list[str] = []
    start = 0
    for end in range(1, len(characters) + 1):
        is_last = end == len(characters)
        if is_last or ord(characters[end]) != ord(characters[end - 1]) + 1:
            ranges.append(f"{re.escape(characters[start])}-{re.escape(characters[end - 1])}")
            start = end
    return "".join(ranges)


def choose_stand_ins(line: str) -> dict[str, str]:
    """Returns {run of characters to keep together: the letter that stands for it while Moses reads the line}."""
    if line.isascii():
        return {}
    runs = dict.fromkeys(characters_to_keep().findall(line))
    free_letters = (letter for letter in STAND_INS if letter not in line)
    return dict(zip(runs, free_letters))


def with_stand_ins(line: str) -> str:
    """Returns a line with a letter in the place of each run of characters to keep together."""
    stand_ins = choose_stand_ins(line)
    if not stand_ins:
        return line
    return characters_to_keep().sub(lambda match: stand_ins.get(match[0], match[0]), line)


def without_stand_ins(words: str, line: str) -> str:
    """Returns Moses' words of a line with the line's own characters again. `line`: before it had stand-ins."""
    originals = {ord(letter): run for run, letter in choose_stand_ins(line).items()}
    return words.translate(originals)


def tokenize_file(
    text: Path, output: Path, language: str, *, processes: int, dash_splits: bool = False, stand_ins: bool = True
) -> None:
    """Normalises a file and writes its words by Moses' tokeniser to another file, with blanks between them.

    `stand_ins`: with letters for what Moses would take apart. Only text that is to come back needs them.
    """
    dashes = " -a" if dash_splits else ""
    tool = f"sacremoses --quiet -l {language} -j {processes} normalize -c tokenize{dashes}"
    if dry_run() or output.exists() or not stand_ins or not any(choose_stand_ins(line) for line in lines(text)):
        make(output, f"{tool} < {quote(str(text))}")
        return
    prepared = output.with_name(f"{output.name}.stand-ins")
    words = output.with_name(f"{output.name}.words")
    show_step(f"{prepared}: {text}, where letters stand for what Moses would take apart, such as m² and emoji")
    try:
        with whole(prepared) as (part,):
            write_lines(part, (with_stand_ins(line) for line in lines(text)))
        make(words, f"{tool} < {quote(str(prepared))}")
        show_step(f"{output}: {words}, with the characters of {text} again")
        both = zip(lines(words), lines(text), strict=True)
        with whole(output) as (part,):
            write_lines(part, (without_stand_ins(words_of_line, line) for words_of_line, line in both))
    finally:
        remove(prepared)
        remove(words)


def tokenize_line(line: str, language: str, dash_splits: bool) -> str:
    """Returns the words of a line as `tokenize_file` writes them."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer(language, post_remove_control_chars=True)
    tokenizer = moses_tokenizer(language)
    normalized = normalizer.normalize(with_stand_ins(line))
    words = tokenizer.tokenize(normalized, aggressive_dash_splits=dash_splits, return_str=True)
    return without_stand_ins(words, line)


@functools.cache  # it reads a list of abbreviations
def moses_tokenizer(language: str) -> Any:
    """Returns sacremoses' tokeniser for a language."""
    from sacremoses import MosesTokenizer

    return MosesTokenizer(language)


# ---- BPE


def learn_bpe(files: Sequence[Path], codes: Path, merges: int) -> None:
    """Learns BPE of several files together."""
    names = " ".join(quote(str(path)) for path in files)
    make(codes, f"cat {names} | subword-nmt learn-bpe -s {merges}")


def apply_bpe(codes: Path, text: Path, output: Path, *, processes: int, most: int | None) -> None:
    """Writes the subwords of a file to another one. `most`: the length that a line is cut to, its end included."""
    # subword-nmt divides a file between processes, but not its standard input
    source = f"--num-workers {processes} -i" if processes > 1 else "<"
    cut_command = f" | cut -d ' ' -f -{most - 1}" if most else ""
    make(output, f"subword-nmt apply-bpe -c {quote(str(codes))} {source} {quote(str(text))}{cut_command}")


# ---- SentencePiece


def learn_pieces(files: Sequence[Path], model: Path, *, size: int, block_size: int | None, normalization: str) -> None:
    """Learns a SentencePiece model of several files together.

    `block_size`: of text to denoise, the words of a block. A mark for each of its spans, and one more, is a piece.
    """
    names = " ".join(str(path) for path in files)
    show_step(f"{model}: SentencePiece, {size} pieces of {names}")
    if dry_run() or model.exists():
        return
    import sentencepiece

    marks: list[str] = []
    if block_size:
        # 15 % of the words are taken out, in spans of 3 on average
        spans = max(1, round(block_size * 0.15 / 3))
        marks = [f"<extra_id_{number}>" for number in range(spans + 1)]
    with whole(model) as (part,), open(part, "wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=[str(path) for path in files],
                model_writer=file,
                vocab_size=size,
                hard_vocab_limit=False,  # a small text has fewer pieces
                character_coverage=1.0,  # French and German have few characters, so all can be pieces
                input_sentence_size=10_000_000,
                max_sentence_length=1 << 20,  # bytes: an article may be one line
                shuffle_input_sentence=True,
                user_defined_symbols=marks,
                normalization_rule_name=normalization,
                minloglevel=2,
            )
        except RuntimeError as error:
            needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
            why = str(error).splitlines()[0]
            if needed:
                why = f"the text has more characters; give {needed[1]} or more"
            raise UserError(f"--merges {size}: {why}") from None


def apply_pieces(model: Path, text: Path, output: Path, *, most: int | None, keep_end: bool) -> None:
    """Writes the pieces of a file to another one. `most` and `keep_end`: see `cut`."""
    how = f", cut to {most}" if most else ""
    show_step(f"{output}: {text} in pieces{how}")
    if dry_run() or output.exists():
        return
    split = piece_splitter(model)
    with whole(output) as (part,):
        write_lines(part, (" ".join(cut(split(line), most, keep_end)) for line in lines(text)))


def piece_splitter(model: Path) -> Callable[[str], list[str]]:
    """Returns a function that splits a text into the pieces of a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def split(text: str) -> list[str]:
        return list(processor.encode(text, out_type=str))

    return split


def cut(pieces: Sequence[str], most: int | None, keep_end: bool) -> Sequence[str]:
    """Returns pieces that are cut to a length of `most`, in which the end of the sentence is counted.

    The first pieces stay. With `keep_end` it is the last ones, from the beginning of a word on.
    """
    if not most or len(pieces) < most:
        return pieces
    length = most - 1
    if not keep_end:
        return pieces[:length]
    kept = pieces[len(pieces) - length :]
    for place, piece in enumerate(kept):
        if piece.startswith("\u2581"):
            return kept[place:]
    return kept


# ---- lines that are translated


def line_preparer(data: Path, settings: Mapping[str, Any], language: str) -> Callable[[str], str]:
    """Returns a function that makes subwords of a line in a language, as prepare.sh made them of a source line.

    `data`: a folder of prepare.sh. `settings`: its settings.
    """
    most = settings["truncate-source"]
    if settings["subwords"] == "sentencepiece":
        split = piece_splitter(data / "pieces.model")
        keep_end = bool(settings["keep-end"])

        def to_subwords(line: str) -> str:
            return " ".join(cut(split(line), most, keep_end))
    else:
        from subword_nmt.apply_bpe import BPE

        with open(data / "codes", encoding="utf-8") as codes:
            bpe = BPE(codes)
        dash_splits = bool(settings["dash-splits"])

        def to_subwords(line: str) -> str:
            subwords = bpe.process_line(tokenize_line(line, language, dash_splits)).split()
            return " ".join(cut(subwords, most, keep_end=False))

    def prepare(line: str) -> str:
        text = one_line(line)
        if settings["lowercase"]:
            text = lower(text, language)
        return to_subwords(text)

    return prepare
