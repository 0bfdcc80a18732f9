"""Text of many languages: how it is cleaned, split into subwords, put together again and scored, in any locale.

The text comes from sentences.yaml, a page that says the same in all languages.
"""

import argparse
import itertools
import random
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer as FairseqMoses
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from helpers import assert_refused, run_script
from small_text import small_model_flags

from recipes import checks, languages, metrics, prepare, train, translate
from recipes.steps import ROOT, as_arguments, load
from recipes.text import lines

# {language: its version of the page}
PAGE = yaml.safe_load((ROOT / "tests" / "sentences.yaml").read_text(encoding="utf-8"))
LANGUAGES = [language for language in PAGE if language != "en"]
# arguments of train.sh: two updates of a small model
TRAINING = "--max-update 2 --save-every 2 -- --validate-interval-updates 2 --data-buffer-size 0".split()
TRAINING += as_arguments(small_model_flags("encoder", "decoder"))
# environment variables of a locale that has ASCII alone
ASCII_LOCALE = {
    "LC_ALL": "C",
    "LANG": "",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "latin-1",
}
NUM_OTHER_SENTENCES = 4  # the number of sentences with which `sentences` begins, before the combinations
NUM_TEST_SENTENCES = 24  # the size of the test set of `write_corpus`


def sentences(language):
    """Returns the sentences of the page in a language; line by line, they are translations of each other.

    First come four sentences of their own, then all combinations of who does what where.
    """
    page = PAGE[language]
    combined_sentences = []
    for who, what, where in itertools.product(page["who"], page["what"], page["where"]):
        combined_sentences.append(page["form"].format(who=who, what=what, where=where))
    return page["others"] + combined_sentences


class CleanedLine(NamedTuple):
    """A line with a special character, which is written as an escape if it cannot be seen, and the line it becomes."""

    character: str
    text: str
    expected: str


def make_unchanged_line(character, text):
    """Returns a `CleanedLine` for a text that stays as it is."""
    return CleanedLine(character, text, expected=text)


CLEANED_LINES = [
    # Spaces of all kinds, and ends of lines, become blanks. Several of them become one blank.
    CleanedLine("tab", "a\tb", "a b"),
    CleanedLine("no-break space", "a\u00a0!", "a !"),
    CleanedLine("narrow no-break space", "a\u202f:", "a :"),
    CleanedLine("ideographic space", "a\u3000b", "a b"),
    CleanedLine("thin space", "a\u2009b", "a b"),
    CleanedLine("separators of lines and paragraphs", "a\u2028b\u2029c", "a b c"),
    CleanedLine("control characters that end lines", "a\x85b\x0bc\x0cd\x1ce\x1ff", "a b c d e f"),
    CleanedLine("carriage returns", "a\rb\r", "a b"),
    CleanedLine("several blanks", "  a  b ", "a b"),
    CleanedLine("SentencePiece's sign for a blank", "a\u2581b", "a b"),
    # Characters without width and control characters are removed.
    CleanedLine("characters without width", "\ufeffa\u200bb\u2060c\u00add", "abcd"),
    CleanedLine("control characters", "a\x00b\x07c\x1bd\x7fe", "abcde"),
    CleanedLine("marks of the direction of writing", "a\u200eb\u200fc\u202ad\u2066e", "abcde"),
    # Punctuation of Windows-1252 becomes that of Unicode.
    CleanedLine("punctuation of Windows-1252", "don\x92t \x93so\x94 \x96 \x80", "don’t “so” – €"),
    CleanedLine("a byte without a character in Windows-1252", "a\x81b", "ab"),
    # Letters and accents are composed, also if a hidden character stands between them.
    CleanedLine("accent", "cafe\u0301", "caf\u00e9"),
    CleanedLine("accent behind a space without width", "e\u200b\u0301", "\u00e9"),
    CleanedLine("letters of a Korean syllable", "\u1112\u1161\u11ab", "\ud55c"),
    # All else stays.
    make_unchanged_line("non-joiner in Persian", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0646\u062f"),
    make_unchanged_line("joiner in Hindi", "शक्\u200dति"),
    make_unchanged_line("full-width digits, half-width letters", "３．５０％，ｱﾞ"),
    make_unchanged_line("ligature and compatibility characters", "ﬁ½…²㈱"),
    make_unchanged_line("the vowel am in Thai", "น้ำ"),
    make_unchanged_line("selector of a variant of an emoji", "❤\ufe0f"),
    make_unchanged_line("joiner of emoji", "👩\u200d🚀"),
    make_unchanged_line("a letter that has no composed form in NFC", "क\u093c"),
    make_unchanged_line("sharp s", "ß ẞ"),
    make_unchanged_line("replacement character", "\ufffd"),
    # Signs without width stay if they belong to the spelling: of Mongolian vowels, or of the order of marks.
    make_unchanged_line("Mongolian vowel separator", "ᠪᠠᠭ\u180eᠠ"),
    make_unchanged_line("selector of a Mongolian variant", "ᠮᠣᠩᠭᠣᠯ\u180b"),
    make_unchanged_line("combining grapheme joiner", "a\u034fb"),
    # Ends of words stay, once each, if a script has no blanks.
    make_unchanged_line("end of a word in Khmer", "ភាសា\u200bខ្មែរ"),
    CleanedLine("ends of words in Thai and Lao", "ไทย\u200b\u200bลาว\u200b 1\u200b2", "ไทย\u200bลาว 12"),
    make_unchanged_line("end of a word in Javanese", "ꦗ\u200bꦮ"),
    make_unchanged_line("end of a word in Burmese", "မြန်\u200bUK"),
    # These variants of Chinese characters stay, because names are written with them. Normal forms would replace them.
    # They are written as escapes, because editors may replace them, too.
    CleanedLine(
        "compatibility ideograph",
        "\ufa19\ufa1b\ufa67 \U0002f800e\u0301",
        "\ufa19\ufa1b\ufa67 \U0002f800\u00e9",
    ),
    # Signs that look like letters become these letters.
    CleanedLine("signs of ohm and angstrom", "5 \u2126, 3 \u212b", "5 \u03a9, 3 \u00c5"),
    # A line that shows nothing becomes empty.
    CleanedLine("space without width alone", "\u200b", ""),
    CleanedLine("byte order mark alone", "\ufeff", ""),
    CleanedLine("non-joiner alone", "\u200c", ""),
    CleanedLine("joiner between spaces alone", " \u200d\u00a0", ""),
    CleanedLine("soft hyphen and word joiner alone", "\u00ad\u2060", ""),
    CleanedLine("control character alone", "\x07", ""),
    CleanedLine("Hangul filler alone", "\u3164", ""),
    CleanedLine("Braille blank alone", "\u2800", ""),
    CleanedLine("selector of a variant alone", "\ufe0f", ""),
    CleanedLine("Mongolian selector alone", "\u180b", ""),
    CleanedLine("no character", "", ""),
]


@pytest.mark.parametrize("character, text, expected", CLEANED_LINES, ids=[line.character for line in CLEANED_LINES])
def test_a_line_is_cleaned(character, text, expected):
    assert languages.one_line(text) == expected
    assert languages.one_line(expected) == expected  # a second time changes nothing


def test_every_character_stays_or_is_in_the_table():
    """Unicode's characters are kept in their composed form, but for those in the table of docs/languages.md."""
    for code in (*range(0x21, 0xD800), *range(0xE000, 0x30000)):
        character = chr(code)
        text = f"a{character}b"
        cleaned = languages.one_line(text)
        if unicodedata.name(character, "").startswith("CJK COMPATIBILITY IDEOGRAPH"):
            assert cleaned == text, hex(code)
        elif character not in languages.TABLE:
            assert cleaned == unicodedata.normalize("NFC", text), hex(code)
        becomes_space = " " in languages.TABLE.get(character, "")
        num_words = 2 if becomes_space else 1
        assert len(cleaned.split(" ")) == num_words, hex(code)  # fairseq divides a line into words at spaces


class LowerCase(NamedTuple):
    """A text in lower case, as a language writes it.

    The letters i differ in their dots: I without and İ (I with a dot above) with a dot are capitals; ı without and i
    with a dot are small.
    """

    reason: str
    language: str
    text: str
    expected: str


LOWER_CASES = [
    # Turkish and related languages have two letters i: I becomes ı, and İ becomes i.
    LowerCase("two letters i", "tr", "ISPARTA İZMİR", "ısparta izmir"),
    LowerCase("two letters i", "az", "IĞDIR", "ığdır"),
    LowerCase("two letters i", "tur_Latn", "DIŞ", "dış"),
    LowerCase("two letters i", "tr", "İ", "i"),
    LowerCase("one letter i", "en", "İZMİR I", "izmir i"),
    LowerCase("sharp s", "de", "Straße STRASSE ẞ", "straße strasse ß"),
    LowerCase("another sigma at the end of a word", "el", "ΟΔΟΣ", "οδος"),
    # These languages have two letters i, too, in the Latin alphabet.
    LowerCase("two letters i", "crh_Latn", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "crh", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "gag", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "tt_Latn", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "kaz_Latn", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "kk", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "zza", "KIRIM QIRIM İT", "kırım qırım it"),
    LowerCase("two letters i", "azb-Latn", "KIRIM QIRIM İT", "kırım qırım it"),
    # In Cyrillic text, Latin words are of other languages, which have one letter i.
    LowerCase("Latin word in Cyrillic text", "kk", "Қазақ тілінде IBM", "қазақ тілінде ibm"),
    LowerCase("Latin word of a language in Cyrillic letters", "kk_Cyrl", "IBM", "ibm"),
    LowerCase("Uzbek has one letter i", "uz_Latn", "IBM", "ibm"),
    # Lithuanian keeps the dot of a small letter if there is an accent above it.
    LowerCase("dots below accents", "lt", "J̃ Į́ Ì Š I", "j̇̃ į̇́ i̇̀ š i"),
    LowerCase("no dots below accents", "en", "J̃ Ì", "j̃ ì"),
]


@pytest.mark.parametrize("reason, language, text, expected", LOWER_CASES)
def test_lower_case_follows_the_language(reason, language, text, expected):
    composed_text = unicodedata.normalize("NFC", text)
    assert languages.lower(composed_text, language) == unicodedata.normalize("NFC", expected)


def test_lower_case_keeps_variants_of_chinese_characters():
    variant = "\ufa19"  # NFC would replace it by 神
    assert unicodedata.normalize("NFC", variant) != variant
    for language in ("ja", "lt"):
        assert languages.lower(f"{variant}田 A", language) == f"{variant}田 a"


@pytest.mark.parametrize("pair, kind", [
    ("en de", "bpe"), ("fr en", "bpe"), ("en ru", "bpe"), ("en th", "sentencepiece"), ("zh_CN en", "sentencepiece"),
    ("en tr", "sentencepiece"), ("hi en", "sentencepiece"), ("en de_AT", "sentencepiece"),
])  # fmt: skip
def test_default_subwords_of_a_pair_of_languages(pair, kind, dry_run, tmp_path):
    settings = prepare.prepare("own", pair.split(), out=tmp_path, source=None, chosen={"like": None})
    assert settings["subwords"] == kind


@pytest.mark.parametrize("language, tokenizer", [
    ("de", "13a"), ("zh_CN", "zh"), ("zho-Hans", "zh"), ("yue", "zh"), ("th", "char"), ("my_MM", "char"), ("fa", "13a"),
    ("JA", "ja-mecab"), ("kor_Hang", "ko-mecab"), ("zho_Hant", "zh"), ("yue_Hant", "zh"), ("lzh", "zh"),
    ("nan-Hant", "zh"), ("shn_Mymr", "char"), ("dzo_Tibt", "char"), ("jv-Java", "char"), ("ryu_Jpan", "char"),
    ("khb_Talu", "char"), ("jv_Latn", "13a"), ("en_news", "13a"),
])  # fmt: skip
def test_the_tokenizer_of_bleu_follows_the_language(language, tokenizer, monkeypatch, capsys):
    """If the package of a tokeniser is missing, BLEU counts characters, and prints which package would count words."""
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)
    bleu = metrics.bleu.__wrapped__(language)
    printed = capsys.readouterr().out
    lacks_package = "mecab" in tokenizer
    if lacks_package:
        assert bleu.tokenizer_signature == "char"
        assert f'({tokenizer}): pip install "sacrebleu[{tokenizer[:2]}]"' in printed
    else:
        assert bleu.tokenizer_signature == tokenizer
        assert "pip install" not in printed


@pytest.mark.parametrize("language, text, tokenizer", [
    ("shn", "မႂ်ႇသုင်ၶႃႈ", "char"), ("mnw", "ဘာသာမန်", "char"), ("nod", "ᨣᩤᩴᨾᩮᩬᩥᨦ", "char"),
    ("ii", "ꆈꌠꁱꂷ", "char"), ("nan", "我是臺灣人。", "zh"), ("nan", "góa sī lâng", "13a"),
    ("ojp", "うちなー口", "char"), ("ain", "アイヌ・イタㇰ", "char"), ("am", "ሰላም ለዓለም", "13a"),
    ("xx", "one ខ្មែរ two", "13a"), ("xx", "", "13a"),
    ("vai", "ꕉ" * 30, "char"),  # a text without blanks that is this long is not one word
])  # fmt: skip
def test_the_tokenizer_of_bleu_for_an_unknown_language_follows_the_script(language, text, tokenizer, tmp_path):
    references = tmp_path / "test"
    references.write_text(f"{text}\n", encoding="utf-8")
    bleu = metrics.bleu.__wrapped__(language, references=references)
    assert bleu.tokenizer_signature == tokenizer


@pytest.mark.parametrize("kind, language, line", [
    ("bpe", "fr", "l@@ &apos; homme , &quot; a@@ m@@ i &quot; ! x@@"),
    ("bpe", "de", "Er sagt : &quot; Ja ! &quot; 3,5 % @-@ a"),
    ("sentencepiece", "th", "▁ที่ นี่ ▁มี"), ("sentencepiece", "en", "▁ a b ▁"),
])  # fmt: skip
def test_subwords_are_joined_as_fairseq_joins_them(kind, language, line, tmp_path):
    """The expected text is joined by fairseq's own classes, as fairseq-generate makes them from its flags.

    Subwords of SentencePiece are joined to text at once. Subwords of BPE are joined to words as Moses'
    tokeniser has made them, and these are joined to text.
    """
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\na b\n")  # a file of merges that the class reads, but joining does not need
    if kind == "sentencepiece":
        model = None  # the method does not use the object that it belongs to, which would need a file of a model
        expected = SentencepieceBPE.decode(model, line)
    else:
        flags_of_bpe = argparse.Namespace(bpe_codes=str(codes), bpe_separator="@@")
        flags_of_moses = argparse.Namespace(source_lang="en", target_lang=language)
        words = SubwordNMTBPE(flags_of_bpe).decode(line)
        expected = FairseqMoses(flags_of_moses).decode(words)
    assert languages.join_subwords(line, kind, language) == expected


def write_corpus(folder, language, ending="", form="NFC"):
    """Writes the page in English and another language: 190 pairs to train on, 10 to validate and 24 to test.

    The training set and the test set both have the four sentences with all letters.

    Args:
        folder: the folder to make, which is returned.
        language: a language of the page.
        ending: the ending of its files; by default the language.
        form: Unicode's normal form in which the text is written.
    """
    pairs = list(zip(sentences("en"), sentences(language)))
    other_pairs = pairs[:NUM_OTHER_SENTENCES]
    combinations = pairs[NUM_OTHER_SENTENCES:]
    random.Random(1).shuffle(combinations)
    splits = {
        "test": other_pairs + combinations[:20],
        "valid": combinations[20:30],
        "train": other_pairs + combinations[30:],
    }
    folder.mkdir(parents=True)
    for split, split_pairs in splits.items():
        english_sentences, translations = zip(*split_pairs)
        write_lines(folder / f"{split}.en", english_sentences, form)
        write_lines(folder / f"{split}.{ending or language}", translations, form)
    return folder


def write_lines(path, text_lines, form):
    """Writes lines to a file in one of Unicode's normal forms."""
    text = "".join(f"{line}\n" for line in text_lines)
    path.write_text(unicodedata.normalize(form, text), encoding="utf-8")


def append_text(path, text):
    """Adds text to the end of a file, as it is."""
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(text)


@pytest.fixture
def prepare_page(programs_in_process, tmp_path, capsys):
    """Returns a function that prepares the page in English and a language."""

    def prepare_language(language, *options, ending="", more=("", ""), form="NFC"):
        """Returns the folder of the data, and the text that prepare.sh has printed.

        Args:
            language: a language of the page.
            options: options of prepare.sh.
            ending: the ending of the files in this language; by default the language.
            more: two texts for the end of the test set: in English, and in the language.
            form: Unicode's normal form in which the text is written.
        """
        ending = ending or language
        raw = write_corpus(tmp_path / "raw", language, ending, form)
        more_english, more_in_language = more
        append_text(raw / "test.en", more_english)
        append_text(raw / f"test.{ending}", more_in_language)
        data = tmp_path / "data"
        prepare.main([str(raw), "en", ending, str(data), "--workers", "1", *options])
        return data, capsys.readouterr().out

    return prepare_language


# The files of these languages have another ending than the language. All other files end in the language.
ENDINGS = {"ko": "ko_KR", "zh": "zh-Hans"}
LANGUAGES_IN_NFD = ("vi", "ko", "de")  # their text is written with separate accents, the others' with composed letters
LANGUAGES_IN_LOWER_CASE = ("tr", "ru")  # they are prepared with --lowercase
LANGUAGES_WITH_BPE = ("de", "fr", "ru")  # by default; the others get SentencePiece


class PreparedLanguage(NamedTuple):
    """The page in English and another language, after prepare.sh."""

    language: str
    ending: str  # the files in the other language have it
    form: str  # Unicode's normal form in which the text was written
    is_lowercase: bool
    data: Path  # the folder
    settings: dict  # what prepare.sh has recorded of the data
    printed: str  # what prepare.sh has printed


@pytest.fixture(params=LANGUAGES)
def prepared_language(prepare_page, request):
    """Returns a `PreparedLanguage` for each language, with one more line at the end of the test set: "a book".

    There, the line has a tab, a line separator or no-break spaces instead of single blanks, all of which are spaces.
    """
    language = request.param
    ending = ENDINGS.get(language, language)
    form = "NFD" if language in LANGUAGES_IN_NFD else "NFC"
    is_lowercase = language in LANGUAGES_IN_LOWER_CASE
    options = ["--lowercase"] if is_lowercase else []
    last_english_line = "a\tbook\u2028"
    last_line_in_language = "a\u00a0\u00a0book"
    last_lines = (last_english_line, last_line_in_language)
    data, printed = prepare_page(language, *options, ending=ending, form=form, more=last_lines)
    settings = load(data / "settings.json")
    return PreparedLanguage(language, ending, form, is_lowercase, data, settings, printed)


def test_text_comes_back_from_its_subwords(prepared_language):
    """The report says that all lines of the test set come back, and whether letters had separate accents.

    The training text and the references come back, too.
    """
    language, ending, form, is_lowercase, data, settings, printed = prepared_language
    num_lines = NUM_TEST_SENTENCES + 1  # with the line "a book"
    assert f"\nround trip: BLEU 100.00, {num_lines} of {num_lines} lines are identical\n" in printed
    assert "\nround trip of en: BLEU 100.00" in printed
    assert "warning" not in printed
    says_that_text_was_composed = "which are composed now (NFC)" in printed
    has_separate_accents = form == "NFD"
    assert says_that_text_was_composed == has_separate_accents
    assert settings["round_trip"] == [100.0, num_lines, num_lines]
    expected_subwords = "bpe" if language in LANGUAGES_WITH_BPE else "sentencepiece"
    assert settings["subwords"] == expected_subwords

    # The subwords of the training text can be joined to the text.
    for side in ("en", ending):
        lines_of_subwords = lines(data / "sub" / f"train.{side}")
        joined_lines = [languages.join_subwords(line, settings["subwords"], side) for line in lines_of_subwords]
        assert joined_lines == list(lines(data / "text" / f"train.{side}"))

    # The references begin with the sentences of their own, and end with the line "a book".
    references = (data / f"test.{ending}").read_text(encoding="utf-8").splitlines()
    expected_lines = [*sentences(language)[:NUM_OTHER_SENTENCES], "a book"]
    expected_lines = [unicodedata.normalize("NFC", line) for line in expected_lines]
    if is_lowercase:
        expected_lines = [languages.lower(line, language) for line in expected_lines]
    assert [*references[:NUM_OTHER_SENTENCES], references[-1]] == expected_lines


SYMBOLS = [
    "👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ 🇩🇪 ©️ #️⃣",
    "12 m², x³ und 5½ ①", "𝐇𝐢 Hallo👍!", "за́мок Auf\u200clage 東京-Haus", "\ue000 ᐁm²",
]  # fmt: skip


def test_symbols_come_back_with_bpe(prepare_page):
    """Emoji, raised digits, joiners and accents stay in their words, in the data and in text to be translated.

    The lines with symbols are the last ones of the test set, in both languages.
    """
    text = "".join(f"{line}\n" for line in SYMBOLS)
    num_lines = NUM_TEST_SENTENCES + len(SYMBOLS)
    data, printed = prepare_page("de", "--merges", "60", more=(text, text))
    settings = load(data / "settings.json")
    assert settings["subwords"] == "bpe"
    assert settings["round_trip"] == [100.0, num_lines, num_lines]  # BLEU, the lines that come back, all lines
    assert "warning" not in printed

    # The tokeniser leaves the first line as it is, as it has only symbols. It separates punctuation in some others.
    tokenized_lines = (data / "tok" / "test.de").read_text(encoding="utf-8").splitlines()
    lines_of_symbols = tokenized_lines[-len(SYMBOLS) :]
    assert lines_of_symbols[0] == SYMBOLS[0]

    # translate.sh splits the lines, as an English source, as prepare.sh has split them.
    subwords_of_symbols = list(lines(data / "sub" / "test.en"))[-len(SYMBOLS) :]
    assert translate.prepare_sentences(text, settings, data) == subwords_of_symbols


class ChangedText(NamedTuple):
    """A test set that does not come back from its subwords.

    Attributes:
        language: the language of the test set.
        options: options of prepare.sh.
        more: text that is added to the end of the test set.
        cause: a regular expression for the cause that the report gives.
    """

    language: str
    options: list[str]
    more: str
    cause: str


CHANGED_TEXTS = {
    "Moses' tokeniser separates signs from words": ChangedText(
        "de",
        options=["--merges", "60"],
        more="5°C ±3 a+b\n" * 9,
        cause="here it changes text at °; --subwords sentencepiece",
    ),
    "Moses' tokeniser does not know the language": ChangedText(
        "th",
        options=["--subwords", "bpe", "--merges", "60"],
        more="",  # the page itself does not come back
        cause="Moses' tokeniser does not know th; --subwords sentencepiece",
    ),
    "Moses' normalisation replaces quotation marks and dashes": ChangedText(
        "de",
        options=["--merges", "60"],
        more="Er „sagt“ – „nichts“\n" * 9,
        cause="typographic quotes and dashes, .*; --subwords sentencepiece",
    ),
    "the form NFKC replaces a fraction by digits": ChangedText(
        "de",
        options=["--subwords", "sentencepiece", "--nfkc"],
        more="½ ½ ½ ½ ½ ½ ½\n" * 9,
        cause="--nfkc changes characters",
    ),
}


@pytest.mark.parametrize("changed_text", CHANGED_TEXTS.values(), ids=CHANGED_TEXTS.keys())
def test_text_that_does_not_come_back_is_reported(prepare_page, changed_text):
    """The report has the score of a perfect translation, the first line that differs, the cause, and what to do."""
    num_more_lines = changed_text.more.count("\n")
    more_english = "word\n" * num_more_lines  # the other side of the lines that are added
    more = (more_english, changed_text.more)
    data, printed = prepare_page(changed_text.language, *changed_text.options, more=more)
    score, same, total = load(data / "settings.json")["round_trip"]
    assert score < checks.LEAST_BLEU
    assert same < total == NUM_TEST_SENTENCES + num_more_lines
    assert f"round trip: BLEU {score:.2f}, {same} of {total} lines are identical\n  line " in printed
    assert f"warning: no translation can have more than BLEU {score:.2f}: " in printed
    assert re.search(changed_text.cause, printed)


def test_characters_that_change_form_are_counted(prepare_page):
    """Letters that are composed, and single characters that Unicode's canonical form replaces, are counted apart."""
    _, printed = prepare_page("fr", more=("five ohm\n", "5 \u2126\n"), form="NFD")
    assert "pairs had letters with separate accents (NFD), which are composed now (NFC)" in printed
    assert "1 pairs had characters that Unicode's canonical form (NFC) replaces by others" in printed


def test_lines_that_are_cut_do_not_count_in_the_round_trip(prepare_page):
    """Such lines cannot come back, and a translation may be longer. If all lines are cut, nothing is counted."""
    options = ["--subwords", "sentencepiece", "--keep-end", "--truncate-source", "3", "--truncate-target", "9"]
    data, printed = prepare_page("de", *options, more=("book a\n", "usw.\n"))
    score, same, total = load(data / "settings.json")["round_trip"]
    num_lines = NUM_TEST_SENTENCES + 1
    assert score == 100
    assert 0 < same == total < num_lines
    assert f"; {num_lines - total} more are cut to 9 subwords" in printed
    assert f"round trip of en: no line to compare, because all {num_lines} lines are cut to 3 subwords" in printed


def test_a_test_line_that_shows_nothing_is_refused(prepare_page):
    def prepare_with_such_a_line(_argv):
        """Prepares the page with a character without width as the last English line of the test set."""
        prepare_page("de", more=("\u200b\n", "nichts\n"))

    assert_refused(prepare_with_such_a_line, part="line 25 .* is empty")


# settings of prepared data, as `translate.prepare_sentences` reads them
TURKISH_TO_ENGLISH = {
    "src": "tr",
    "tgt": "en",
    "lowercase": True,
    "subwords": "bpe",
    "dash-splits": None,
    "truncate-source": None,
}


@pytest.fixture
def single_letters(tmp_path):
    """Returns a folder of data whose subwords are single letters."""
    (tmp_path / "codes").write_text("#version: 0.2\nq q</w>\n")
    return tmp_path


def test_a_line_that_shows_nothing_is_translated_as_an_empty_line(single_letters):
    text = "\u200b\nIŞIK\tİ\u00ad\r\n\ufeff\u200c \n"
    prepared_lines = translate.prepare_sentences(text, TURKISH_TO_ENGLISH, single_letters)
    assert [languages.without_bpe(line) for line in prepared_lines] == ["", "ışık i", ""]


def test_constraints_are_prepared_as_text_of_the_target_language(single_letters):
    text = "IŞIK Ğ\tI\u00a0see\tAuto\n"
    (line,) = translate.prepare_sentences(text, TURKISH_TO_ENGLISH, single_letters, has_constraints=True)
    assert [languages.without_bpe(part) for part in line.split("\t")] == ["ışık ğ", "i see", "auto"]


@pytest.mark.ci
@pytest.mark.slow
def test_any_locale(programs_in_process, tmp_path):
    """The scripts, and the programs that they call, read and write UTF-8 even if the locale has ASCII alone.

    Python reads the locale when it starts, so that the scripts and their programs are new processes: ten in all, which
    import torch, fairseq or sacremoses.
    """
    raw = write_corpus(tmp_path / "raw", "ru")
    data = tmp_path / "data"
    run = tmp_path / "run"

    process = run_script("prepare.sh", raw, "en", "ru", data, env=ASCII_LOCALE, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    assert f"{data} is ready" in process.stdout  # without an error at a Russian letter

    # A training reads only the numbers of words, so it may run in this process.
    train.main([str(data), "random_vanilla", "--save-dir", str(run), *TRAINING])
    process = run_script("evaluate.sh", run, "--average", 0, "--beam", 1, env=ASCII_LOCALE, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    # evaluate.sh prints Russian letters. It has read the subwords and the references without changes, as all of them
    # come back, and has computed all scores.
    assert f"reference: {sentences('ru')[0]}\n" in process.stdout
    figures = load(run / "evaluation" / "scores.json")["figures"]
    assert figures["round_trip"]["score"] == 100
    assert f"{NUM_TEST_SENTENCES} of {NUM_TEST_SENTENCES}" in figures["round_trip"]["signature"]
    assert {"bleu", "chrf", "tokenised"} < set(figures)
    assert figures["bleu"]["signature"].count("tok:") == 1  # the tokeniser is named once

    # translate.sh reads quotation marks and letters of two alphabets, and writes a line for each line, also for the
    # second one, which has only a space without width.
    text = "“ľuboš” мой брат\n\u200b\n"
    process = run_script("translate.sh", run, "--beam", 1, env=ASCII_LOCALE, input=text, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 2
