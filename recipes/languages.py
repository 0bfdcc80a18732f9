"""Rules for text of any language: its characters, its lower case, its tokenisers, and how subwords become text again.

docs/languages.md describes them for users.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Literal

# ---- codes of languages

# {another code of a language that is named below: its code}. FLORES and NLLB use three letters; cn and jp are mistakes
# that are often made
CODES = {
    "cmn": "zh", "zho": "zh", "cn": "zh", "jpn": "ja", "jp": "ja", "kor": "ko",
    "tha": "th", "lao": "lo", "khm": "km", "mya": "my", "bod": "bo", "dzo": "dz",
    "tur": "tr", "aze": "az", "azj": "az", "lit": "lt",
    "tat": "tt", "kaz": "kk", "bak": "ba", "kir": "ky",
}  # fmt: skip
# Languages whose words Moses' tokeniser gives back as they were. It has rules for more languages, but Dutch (foto's),
# Italian (un po' di), Greek, Catalan, Irish and Tetum lose or get blanks next to apostrophes, Finnish and Swedish next
# to colons (EU:s), those of India before their full stop, and Chinese before all punctuation.
MOSES = ["cs", "de", "en", "es", "et", "fr", "hu", "is", "lt", "lv", "pl", "pt", "ro", "ru", "sk", "sl"]
# Languages whose Latin alphabet has two letters: I, in small ı, and İ, in small i. Most of them have another alphabet
# too, which many texts are written in.
DOTLESS_I = {
    "tr", "az", "azb", "gag", "crh", "tt", "kk", "kaa", "ba", "ky", "kum", "krc", "nog", "alt", "kjh", "tyv", "sah",
    "slr", "klj", "kmz", "uum", "ota", "bgx",  # Turkic
    "zza", "diq", "kiu", "tly", "ttt", "jdt",  # Zazaki, Talysh, Tat
}  # fmt: skip
# sacreBLEU's tokenisers for languages that need another one than 13a, which takes words from between blanks
TOKENIZERS = {
    "zh": "zh", "yue": "zh", "wuu": "zh", "lzh": "zh", "hak": "zh", "gan": "zh", "hsn": "zh",
    "ja": "ja-mecab", "ko": "ko-mecab",
    "th": "char", "lo": "char", "km": "char", "my": "char", "bo": "char", "dz": "char",
}  # fmt: skip
# Scripts that put no blanks between words, by the first word of their characters' names in Unicode. "TAI" is Tai Le,
# Tai Tham and Tai Viet, "NEW" is New Tai Lue.
UNSPACED_SCRIPTS = {
    "AHOM", "BALINESE", "BOPOMOFO", "CJK", "HIRAGANA", "JAVANESE", "KATAKANA", "KHMER", "LAO", "MYANMAR", "NEW",
    "NUSHU", "TAI", "TANGUT", "THAI", "TIBETAN", "YI",
}  # fmt: skip
# The same scripts, as codes of languages name them: shn_Mymr, zho-Hant
SCRIPT_CODES = {
    "ahom": "AHOM", "bali": "BALINESE", "bopo": "BOPOMOFO", "hani": "CJK", "hans": "CJK", "hant": "CJK",
    "hira": "HIRAGANA", "hrkt": "HIRAGANA", "jpan": "HIRAGANA", "java": "JAVANESE", "kana": "KATAKANA",
    "khmr": "KHMER", "laoo": "LAO", "mymr": "MYANMAR", "talu": "NEW", "nshu": "NUSHU", "lana": "TAI", "tale": "TAI",
    "tavt": "TAI", "tang": "TANGUT", "thai": "THAI", "tibt": "TIBETAN", "yiii": "YI",
}  # fmt: skip
LONGEST_WORDS = 25  # letters: no language has longer words on average, so such text has no blanks between its words


def base(language: str) -> str:
    """Returns the code of a language without its script and country: zh for zh_CN, zh-Hans and zho_Hant."""
    code = re.split("[-_]", language.lower())[0]
    return CODES.get(code, code)


def script_code(language: str) -> str:
    """Returns the script that the code of a language names, in small letters: hant for zho_Hant, else ``""``."""
    parts = re.split("[-_]", language.lower())[1:]
    scripts = [part for part in parts if len(part) == 4 and part.isalpha()]
    return scripts[0] if scripts else ""


# ---- characters

CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
# characters without width that change no letter: soft hyphen, zero-width space, word joiner, byte-order mark
NO_WIDTH = [0xAD, 0x200B, 0x2060, 0xFEFF]
# marks of the direction of writing; invisible operators of mathematics and formatting that Unicode has given up
DIRECTIONS = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)]
INVISIBLE = [*range(0x2061, 0x2070)]
SPACES = [code for code in range(0x21, 0x3001) if chr(code).isspace()]
# tabs and all that ends a line, somewhere; and U+2581, which SentencePiece writes for a blank
BLANKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029\u2581"


def replacements() -> dict[str, str]:
    """Returns {character: what it becomes}, for all that do not stay. Later lines have precedence over earlier ones."""
    table = {chr(code): "" for code in (*CONTROLS, *NO_WIDTH, *DIRECTIONS, *INVISIBLE)}
    for code in range(0x80, 0xA0):  # punctuation of Windows-1252 that was taken for Latin 1
        table[chr(code)] = bytes([code]).decode("cp1252", "ignore")
    for code in SPACES:
        table[chr(code)] = " "
    for character in BLANKS:
        table[character] = " "
    return table


TABLE = replacements()
# Where a script has no blanks a zero-width space ends a word, and belongs to the spelling: in the blocks from Thai to
# Myanmar, Khmer, New Tai Lue, Tai Tham, Balinese, Javanese and Tai Viet.
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaadf"
USELESS_ZERO_WIDTH_SPACE = f"(?<![{UNSPACED}])\u200b(?![{UNSPACED}])|(?<!\\S)\u200b|\u200b(?!\\S)"
REPLACED = re.compile(f"[{re.escape(''.join(set(TABLE) - {chr(0x200B)}))}]|{USELESS_ZERO_WIDTH_SPACE}")
# characters that cannot be seen without others: joiners, fillers, vowels without a form, variation selectors
UNSEEN = re.compile(
    "[ \u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200c\u200d\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]*"
)
# Variants of Chinese characters that names are written with, which look different. Unicode's normal forms replace them.
NO_COMPATIBILITY_IDEOGRAPHS = re.compile("[^\uf900-\ufaff\U0002f800-\U0002fa1f]+")


def one_line(text: str) -> str:
    """Returns a text as it is prepared, scored and translated: in one line, in NFC, with single blanks.

    A text that shows nothing becomes an empty one.
    """
    text = re.sub("\u200b+", "\u200b", text)
    text = REPLACED.sub(lambda match: TABLE[match[0]], text)
    text = " ".join(normalize("NFC", text).split())
    return "" if UNSEEN.fullmatch(text) else text


def normalize(form: Literal["NFC", "NFD"], text: str) -> str:
    """Returns a text in a normal form of Unicode, NFC or NFD, in which compatibility ideographs stay as they are."""
    return NO_COMPATIBILITY_IDEOGRAPHS.sub(lambda match: unicodedata.normalize(form, match[0]), text)


def has_separate_accents(text: str) -> bool:
    """Returns whether NFC joins characters of a text, such as a letter and an accent."""
    return "".join(normalize("NFC", character) for character in text) != normalize("NFC", text)


def has_canonical_variants(text: str) -> bool:
    """Returns whether NFC replaces single characters of a text, such as the sign of ohm by the Greek letter omega."""
    return any(normalize("NFC", character) != character for character in text)


# ---- lower case


def lower(text: str, language: str) -> str:
    """Returns a text in NFC in small letters, by the rules of its language."""
    if "I" in text and has_dotless_i(text, language):
        text = text.replace("I", "ı")
    if base(language) == "lt":  # the dot of i and j stays below an accent
        text = re.sub("([IJ]\u0328?)(?=[\u0300\u0301\u0303])", "\\1\u0307", normalize("NFD", text))
    return normalize("NFC", text.replace("İ", "i").lower())


def has_dotless_i(text: str, language: str) -> bool:
    """Returns whether I and İ are two letters in a text: whether its language is one of those, in the Latin alphabet.

    Without a script in the language's code most letters of the text decide: in Kazakh text that is written in
    Cyrillic, a Latin word is a name or English.
    """
    if base(language) not in DOTLESS_I:
        return False
    script = script_code(language)
    if script in ("latn", "cyrl", "arab", "hebr"):
        return script == "latn"
    letters = [character for character in text if character.isalpha()]
    latin = [letter for letter in letters if script_name(letter) == "LATIN"]
    return 2 * len(latin) > len(letters)


def script_name(character: str) -> str:
    """Returns the first word of a character's name in Unicode, which for letters is the script."""
    return unicodedata.name(character, "").split(" ")[0]


# ---- words


def bleu_tokenizer(language: str, text: Iterable[str] = ()) -> str:
    """Returns the name of sacreBLEU's tokeniser for a language.

    Where the code of the language decides nothing, the script that it names does, else that of `text`, the lines that
    translations are compared with: a script without blanks between words is scored by characters.
    """
    if base(language) in TOKENIZERS:
        return TOKENIZERS[base(language)]
    script = script_code(language)
    if script in SCRIPT_CODES:
        return _tokenizer_for_scripts(Counter([SCRIPT_CODES[script]]))
    lines = list(text)
    letters = [character for line in lines for character in line if character.isalpha()]
    scripts = Counter(script_name(letter) for letter in letters)
    word_count = sum(len(line.split()) for line in lines)
    if letters and len(letters) > LONGEST_WORDS * word_count:
        return "zh" if _tokenizer_for_scripts(scripts) == "zh" else "char"
    return _tokenizer_for_scripts(scripts)


def _tokenizer_for_scripts(scripts: Counter[str]) -> str:
    """Returns the tokeniser for text with so many letters of each script, by the name that `script_name` returns."""
    unspaced = sum(scripts[name] for name in UNSPACED_SCRIPTS)
    if 2 * unspaced <= scripts.total():
        return "13a"
    # sacreBLEU's tokeniser for Chinese sets Chinese characters apart, but not the kana of Japanese
    return "zh" if 10 * scripts["CJK"] >= 9 * unspaced else "char"


# ---- subwords


def undone(line: str, kind: str, language: str) -> str:
    """Returns a line of subwords as text, as fairseq-generate does it.

    `kind`: ``bpe`` for subwords of Moses' words, or ``sentencepiece``.
    """
    if kind == "sentencepiece":
        return line.replace(" ", "").replace("\u2581", " ").strip()
    from sacremoses import MosesDetokenizer

    return str(MosesDetokenizer(language).detokenize(without_bpe(line).split()))


def without_bpe(line: str) -> str:
    """Returns a line of BPE's subwords as words."""
    return f"{line} ".replace("@@ ", "").strip()
