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

    Args:
        text: the file to read.
        output: the file to write; an existing file is kept.
        language: the code of the language.
        processes: how many processes share the work.
        dash_splits: words are split at hyphens too.
        stand_ins: keeps together what Moses would take apart, by letters that stand for it meanwhile. Only text whose
            words are joined again later needs this.
    """
    dashes = " -a" if dash_splits else ""
    tool = f"sacremoses --quiet -l {language} -j {processes} normalize -c tokenize{dashes}"
    if dry_run() or output.exists() or not stand_ins or not any(choose_stand_ins(line) for line in lines(text)):
        make(output, f"{tool} < {quote(str(text))}")
        return
    text_with_stand_ins = output.with_name(f"{output.name}.stand-ins")
    words_with_stand_ins = output.with_name(f"{output.name}.words")
    show_step(
        f"{text_with_stand_ins}: {text}, where letters stand for what Moses would take apart, such as m² and emoji"
    )
    try:
        with whole(text_with_stand_ins) as (part,):
            write_lines(part, (with_stand_ins(line) for line in lines(text)))
        make(words_with_stand_ins, f"{tool} < {quote(str(text_with_stand_ins))}")
        show_step(f"{output}: {words_with_stand_ins}, with the characters of {text} again")
        words_and_lines = zip(lines(words_with_stand_ins), lines(text), strict=True)
        with whole(output) as (part,):
            write_lines(part, (without_stand_ins(words, line) for words, line in words_and_lines))
    finally:
        remove(text_with_stand_ins)
        remove(words_with_stand_ins)


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
    """Splits the words of a file into subwords, and writes them to another file.

    Args:
        codes: the merges that `learn_bpe` has written.
        text: the file to read.
        output: the file to write; an existing file is kept.
        processes: how many processes share the work.
        most: the length in subwords that a line is cut to, its end included; None: no line is cut.
    """
    # subword-nmt divides a file between processes, but not its standard input
    reading = f"--num-workers {processes} -i" if processes > 1 else "<"
    cutting = f" | cut -d ' ' -f -{most - 1}" if most else ""  # the end of the sentence counts, but is not in the file
    make(output, f"subword-nmt apply-bpe -c {quote(str(codes))} {reading} {quote(str(text))}{cutting}")


def bpe_splitter(codes: Path, language: str, dash_splits: bool) -> Callable[[str], list[str]]:
    """Returns a function that splits a text of one line into Moses' words, and the words into subwords.

    Args:
        codes: the merges that `learn_bpe` has written.
        language: the language of the text.
        dash_splits: whether words are split at hyphens too.
    """
    from subword_nmt.apply_bpe import BPE

    with open(codes, encoding="utf-8") as merges:
        bpe = BPE(merges)

    def split_into_subwords(text: str) -> list[str]:
        """Returns the subwords of a text of one line."""
        words = tokenize_line(text, language, dash_splits)
        return list(bpe.process_line(words).split())

    return split_into_subwords


# ---- SentencePiece

BEGINNING_OF_WORD = "\u2581"  # SentencePiece writes it in the place of the blank before a word


def learn_pieces(files: Sequence[Path], model: Path, *, size: int, block_size: int | None, normalization: str) -> None:
    """Learns a SentencePiece model from several files together.

    Args:
        files: the training text.
        model: the file to write.
        size: how many pieces are learned.
        block_size: how many words a block of text to denoise has; None for other text.
        normalization: the name of SentencePiece's rule that unifies letters, or ``identity``.
    """
    names = " ".join(str(path) for path in files)
    show_step(f"{model}: SentencePiece, {size} pieces of {names}")
    if dry_run() or model.exists():
        return
    import sentencepiece

    marks = list_span_marks(block_size) if block_size else []
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
            raise UserError(f"--merges {size}: {explain_training_error(error)}") from None


def explain_training_error(error: RuntimeError) -> str:
    """Returns why SentencePiece could not learn a model, and what to do if it was given too few pieces."""
    # the smallest number of pieces is that of the text's characters, of which each has to be a piece
    smallest_number = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if smallest_number:
        return f"the text has more characters; give {smallest_number[1]} or more"
    return str(error).splitlines()[0]


def list_span_marks(block_size: int) -> list[str]:
    """Returns the marks that stand for the spans of a block of text to denoise, and one mark more."""
    # 15 % of the words are taken out, in spans of 3 words on average, as `pairs.corrupt_spans` does
    number_of_spans = max(1, round(block_size * 0.15 / 3))
    return [f"<extra_id_{number}>" for number in range(number_of_spans + 1)]


def apply_pieces(model: Path, text: Path, output: Path, *, most: int | None, keep_end: bool) -> None:
    """Splits the lines of a file into pieces, and writes them to another file with blanks between the pieces.

    Args:
        model: a SentencePiece model, made by `learn_pieces`.
        text: the file to read.
        output: the file to write; an existing file is kept.
        most: the length in pieces that a line is cut to, its end included; None: no line is cut.
        keep_end: a line that is cut loses its beginning, not its end.
    """
    how = f", cut to {most}" if most else ""
    show_step(f"{output}: {text} in pieces{how}")
    if dry_run() or output.exists():
        return
    split_into_pieces = piece_splitter(model)
    with whole(output) as (part,):
        write_lines(part, (" ".join(cut(split_into_pieces(line), most, keep_end)) for line in lines(text)))


def piece_splitter(model: Path) -> Callable[[str], list[str]]:
    """Returns a function that splits a text into the pieces of a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def split_into_pieces(text: str) -> list[str]:
        """Returns the pieces of a text."""
        return list(processor.encode(text, out_type=str))

    return split_into_pieces


def cut(pieces: Sequence[str], most: int | None, keep_end: bool) -> Sequence[str]:
    """Returns pieces that are cut to a length of `most`, in which the end of the sentence is counted.

    The first pieces are kept. With `keep_end` the last pieces are kept, from the first beginning of a word among them.
    """
    if not most or len(pieces) < most:
        return pieces
    length = most - 1  # without the end of the sentence
    if not keep_end:
        return pieces[:length]
    kept = pieces[len(pieces) - length :]
    for place, piece in enumerate(kept):
        if piece.startswith(BEGINNING_OF_WORD):
            return kept[place:]
    return kept


# ---- lines that are translated


def line_preparer(data: Path, settings: Mapping[str, Any], language: str) -> Callable[[str], str]:
    """Returns a function that prepares a line of text as prepare.sh has prepared the source lines.

    The function returns the line's subwords, with blanks between them.

    Args:
        data: a folder of prepare.sh.
        settings: the settings of these data.
        language: the language of the lines.
    """
    most = settings["truncate-source"]
    if settings["subwords"] == "sentencepiece":
        split_into_subwords = piece_splitter(data / "pieces.model")
        keep_end = bool(settings["keep-end"])
    else:
        split_into_subwords = bpe_splitter(data / "codes", language, dash_splits=bool(settings["dash-splits"]))
        keep_end = False  # prepare.sh cuts text in BPE at its end only

    def prepare_line(line: str) -> str:
        """Returns the subwords of a line, cut to the length of a source line."""
        text = one_line(line)
        if settings["lowercase"]:
            text = lower(text, language)
        return " ".join(cut(split_into_subwords(text), most, keep_end))

    return prepare_line
