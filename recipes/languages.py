"""Languages: what becomes of each character of a text, and which tools suit its language. See docs/languages.md."""

import re
import unicodedata

# other codes of languages that are named below: those of FLORES and NLLB, and two that are often met
CODES = {
    **{"cmn": "zh", "zho": "zh", "cn": "zh", "jpn": "ja", "jp": "ja", "kor": "ko"},
    **{"tha": "th", "lao": "lo", "khm": "km", "mya": "my", "bod": "bo", "dzo": "dz"},
    **{"tur": "tr", "aze": "az", "azj": "az", "lit": "lt"},
}
# Languages whose words Moses' tokeniser gives back as they were. It has rules for more: Dutch (foto's), Italian (un po'
# di), Greek, Catalan, Irish and Tetum lose or get blanks beside apostrophes, Finnish and Swedish behind colons (EU:s),
# those of India before their full stop, and Chinese before all punctuation.
MOSES = "cs de en es et fr hu is lt lv pl pt ro ru sk sl".split()
# sacreBLEU's tokenisers of those that need another one than 13a, which has words between blanks. Of Thai and others
# that are written without, it counts characters.
TOKENIZERS = {
    **dict.fromkeys(("zh", "yue", "wuu", "lzh"), "zh"),
    **{"ja": "ja-mecab", "ko": "ko-mecab"},
    **dict.fromkeys(("th", "lo", "km", "my", "bo", "dz"), "char"),
}
CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
# soft hyphen, zero-width space, word joiner, byte-order mark; then marks of direction, and what shows no characters
HIDDEN = (0xAD, 0x180E, 0x200B, 0x2060, 0xFEFF, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2061, 0x2070))
TABLE: dict[str, str] = {  # {character: what it becomes}; later entries count, and all others stay
    **{chr(code): "" for code in (*CONTROLS, *HIDDEN)},
    # punctuation of Windows-1252 that was taken for Latin 1
    **{chr(code): bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)},
    # any space: tabs, ends of lines, those without a break. SentencePiece writes a blank as the last one
    **{chr(code): " " for code in range(0x21, 0x3001) if chr(code).isspace()},
    **dict.fromkeys("\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2581", " "),
}
ODD = re.compile(f"[{re.escape(''.join(TABLE))}]")
# what stays, but cannot be seen alone: joiners, fillers, variation selectors
UNSEEN = re.compile(
    "[ \u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200c\u200d\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]*"
)


def base(language: str) -> str:
    """The code of a language without script and country: zh of zh_CN, zh-Hans, zho_Hant."""
    code = re.split("[-_]", language.lower())[0]
    return CODES.get(code, code)


def one_line(text: str) -> str:
    """A text as it is prepared, scored and translated: a line in NFC with single blanks, empty if nothing is seen."""
    text = ODD.sub(lambda found: TABLE[found[0]], text)
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return "" if UNSEEN.fullmatch(text) else text


def lower(text: str, language: str) -> str:
    """Text in NFC in small letters, by the rules of its language."""
    code = base(language)
    if code in ("tr", "az"):  # i with and without a dot are two letters
        text = text.replace("I", "ı")
    if code == "lt":  # the dot stays below an accent
        text = re.sub("([IJ]\u0328?)(?=[\u0300\u0301\u0303])", "\\1\u0307", unicodedata.normalize("NFD", text))
    return unicodedata.normalize("NFC", text.replace("İ", "i").lower())


def undone(line: str, kind: str, language: str) -> str:
    """A line of subwords as text, as fairseq-generate undoes them. `kind`: bpe, of Moses' words, or sentencepiece."""
    if kind == "sentencepiece":
        return line.replace(" ", "").replace("\u2581", " ").strip()
    from sacremoses import MosesDetokenizer

    return str(MosesDetokenizer(language).detokenize(without_bpe(line).split()))


def without_bpe(line: str) -> str:
    """A line of BPE's subwords as words."""
    return f"{line} ".replace("@@ ", "").strip()
