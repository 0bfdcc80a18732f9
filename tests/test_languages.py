"""Text of many languages: it comes back as it went in, is scored by its language's rules, in any locale."""

import argparse
import unicodedata

import pytest
import yaml
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer as FairseqMoses
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from sacrebleu.metrics import BLEU
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

from recipes import languages, metrics
from recipes.steps import ROOT

PAGE = yaml.safe_load((ROOT / "tests" / "sentences.yaml").read_text(encoding="utf-8"))
LANGUAGES = [language for language in PAGE if language != "en"]


def sentences(language):
    """All that the page makes: the same number of lines for each language, translations of each other."""
    page = PAGE[language]
    parts = [{"who": a, "what": b, "where": c} for a in page["who"] for b in page["what"] for c in page["where"]]
    return page["others"] + [page["form"].format(**part) for part in parts]


@pytest.mark.parametrize("text, wanted", [
    # spaces of all kinds, and ends of lines, are blanks; several are one
    ("a\tb", "a b"), ("a\u00a0!", "a !"), ("a\u202f:", "a :"), ("a\u3000b", "a b"), ("a\u2009b", "a b"),
    ("a\u2028b\u2029c", "a b c"), ("a\x85b\x0bc\x0cd\x1ce\x1ff", "a b c d e f"), ("a\rb\r", "a b"), ("  a  b ", "a b"),
    ("a\u2581b", "a b"),
    # what has no width, and control characters, are nothing
    ("\ufeffa\u200bb\u2060c\u00add", "abcd"), ("a\x00b\x07c\x1bd\x7fe", "abcde"),
    ("a\u200eb\u200fc\u202ad\u2066e", "abcde"),
    # punctuation of Windows-1252
    ("don\x92t \x93so\x94 \x96 \x80", "don’t “so” – €"), ("a\x81b", "ab"),
    # letters are composed, also where something hidden stood between
    ("cafe\u0301", "café"), ("e\u200b\u0301", "é"), ("\u1112\u1161\u11ab", "한"),
    # and all else stays: joiners, full-width letters, ligatures, Thai's am, selectors, what has no composed form
    *[(text, text) for text in ("می‌خواند", "शक्\u200dति", "３．５０％，ｱﾞ", "ﬁ½…²㈱", "น้ำ", "❤\ufe0f", "👩\u200d🚀",
        "क\u093c", "ß ẞ", "�")],
    # a line that shows nothing is empty
    *[(text, "") for text in ("\u200b", "\ufeff", "\u200c", " \u200d\u00a0", "\u00ad\u2060", "\x07", "\u3164",
        "\u2800", "\ufe0f", "\u180b", "")],
])  # fmt: skip
def test_what_becomes_of_characters(text, wanted):
    assert languages.one_line(text) == wanted
    assert languages.one_line(wanted) == wanted  # a second time changes nothing


def test_every_character_stays_or_is_in_the_table():
    """All that Unicode has, but for what the table of docs/languages.md names."""
    for code in (*range(0x21, 0xD800), *range(0xE000, 0x30000)):
        found = languages.one_line(f"a{chr(code)}b")
        if chr(code) not in languages.TABLE:
            assert found == unicodedata.normalize("NFC", f"a{chr(code)}b"), hex(code)
        assert len(found.split(" ")) == 1 + (" " in languages.TABLE.get(chr(code), "")), hex(code)  # as fairseq divides


@pytest.mark.parametrize("language, code", [
    ("de", "de"), ("zh_CN", "zh"), ("zh-Hans", "zh"), ("zho_Hant", "zh"), ("pt-BR", "pt"), ("JA", "ja"), ("jpn_Jpan",
    "ja"),
    ("yue", "yue"), ("source", "source"), ("tur_Latn", "tr"),
])  # fmt: skip
def test_base(language, code):
    assert languages.base(language) == code


@pytest.mark.parametrize("text, language, wanted", [
    ("ISPARTA İZMİR", "tr", "ısparta izmir"), ("IĞDIR", "az", "ığdır"), ("DIŞ", "tr_TR", "dış"), ("İZMİR I", "en",
    "izmir i"),
    ("Straße STRASSE ẞ", "de", "straße strasse ß"), ("ΟΔΟΣ", "el", "οδος"), ("İ", "tr", "i"),
    ("J̃ Į́ Ì Š I", "lt", "j̇̃ į̇́ i̇̀ š i"), ("J̃ Ì", "en", "j̃ ì"),
])  # fmt: skip
def test_lower(text, language, wanted):
    assert languages.lower(unicodedata.normalize("NFC", text), language) == unicodedata.normalize("NFC", wanted)


@pytest.mark.parametrize("pair, kind", [
    ("en de", "bpe"), ("fr en", "bpe"), ("en ru", "bpe"), ("en th", "sentencepiece"), ("zh_CN en", "sentencepiece"),
    ("en tr", "sentencepiece"), ("hi en", "sentencepiece"), ("en de_AT", "sentencepiece"), ("source target",
    "sentencepiece"),
])  # fmt: skip
def test_default_subwords(pair, kind):
    assert languages.subwords(*pair.split()) == kind


@pytest.mark.parametrize("language, tokenizer", [
    ("de", "13a"), ("zh_CN", "zh"), ("zh-Hans", "zh"), ("zho_Hans", "zh"), ("yue", "zh"), ("ja", "ja-mecab"),
    ("ko_KR", "ko-mecab"),
    ("th", "char"), ("my_MM", "char"), ("fa", "13a"),
])  # fmt: skip
def test_tokenizer_of_bleu(language, tokenizer):
    assert languages.bleu_tokenizer(language) == tokenizer
    assert tokenizer in BLEU.TOKENIZERS


@pytest.mark.parametrize("language, module", [("ja", "tokenizer_ja_mecab"), ("ko_KR", "tokenizer_ko_mecab")])
def test_without_the_package_of_a_tokenizer(language, module, monkeypatch, capsys):
    """BLEU counts characters, and says which package counts words."""
    monkeypatch.setattr(f"sacrebleu.tokenizers.{module}.MeCab", None)
    metrics.bleu.cache_clear()
    metrics.bleu(language)
    assert f'pip install "sacrebleu[{language[:2]}]"' in capsys.readouterr().out.splitlines()[0]
    assert metrics.bleu("th").tokenizer_signature == metrics.bleu(language).tokenizer_signature == "char"


@pytest.mark.parametrize("kind, language, line", [
    ("bpe", "fr", "l@@ &apos; homme , &quot; a@@ m@@ i &quot; ! x@@"),
    ("bpe", "de", "Er sagt : &quot; Ja ! &quot; 3,5 % @-@ a"),
    ("sentencepiece", "th", "▁ที่ นี่ ▁มี"), ("sentencepiece", "en", "▁ a b ▁"),
])  # fmt: skip
def test_undone_as_fairseq_does(kind, language, line, tmp_path):
    """fairseq's own subwords and tokeniser, as fairseq-generate makes them of their flags."""
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    flags = argparse.Namespace(bpe_codes=str(tmp_path / "codes"), bpe_separator="@@", target_lang=language)
    flags.source_lang = "en"
    if kind == "sentencepiece":
        wanted = SentencepieceBPE.decode(None, line)
    else:
        wanted = FairseqMoses(flags).decode(SubwordNMTBPE(flags).decode(line))
    assert languages.undone(line, kind, language) == wanted


def test_words_of_moses_languages_come_back():
    """One of the reasons why each other language is not in the list."""

    def back(text, language):
        tokens = MosesTokenizer(language).tokenize(MosesPunctNormalizer(language).normalize(text))
        return MosesDetokenizer(language).detokenize(tokens)

    for language in {*LANGUAGES, "en"} & {*languages.MOSES}:
        assert [back(text, language) for text in sentences(language)] == sentences(language)
    others = {
        **{"nl": "De foto's.", "it": "Un po' di.", "fi": "EU:n", "sv": "EU:s", "ca": "L'home.", "ga": "B'fhéidir."},
        **{"tdt": "La'o.", "el": "Απ' το", "hi": "है।", "zh": "好！", "tr": "İzmir'e"},
    }
    for language, text in others.items():
        assert language not in languages.MOSES and back(text, language) != text
