"""Right and wrong spellings of answers, made from numbers, not from the reader that they test."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

# fmt: off

class Case(NamedTuple):
    """A reference, spellings of the same answer, and answers that are others."""

    kind: str
    reference: str
    right: list[str]
    wrong: list[str]

def thousands(value: int, gap: str) -> str:
    """Return a whole number with a gap between thousands."""
    return f"{value:,}".replace(",", gap)

def digits_changed(value: int, dice: random.Random) -> list[int]:
    """Return numbers that look like one: a digit off, one more, one less, two in another order."""
    text = str(value)
    place = dice.randrange(len(text))
    other = str((int(text[place]) + dice.randint(1, 9)) % 10)
    found = {int(text[:place] + other + text[place + 1 :]), int(text + str(dice.randrange(10))), value + 1, value * 10}
    if len(text) > 1:
        found |= {int(text[1:]), int(text[:-1]), int(text[::-1])}
    return sorted(found - {value})

def whole(dice: random.Random) -> Case:
    value = dice.choice([dice.randint(2, 99), dice.randint(1000, 99999)])
    right = [
        str(value), f"{value}.0", f"{value}.", rf"\text{{{value}}}", rf"x = {value}", rf"\mathbf{{{value}}}",
        f"+{value}", rf"\frac{{{3 * value}}}{{3}}", rf"\${value}", f"{value}\\text{{ apples}}",
    ]
    if value >= 1000:
        right += [thousands(value, gap) for gap in (",", "{,}", "\\,", "\u202f")]
    wrong = [str(each) for each in digits_changed(value, dice)]
    wrong += [f"-{value}", rf"{value}!\cdot 1", f"{value}^2", f"0.{value}"]
    wrong += [f"({value},{value})", f"{value}, {value + 1}", f"\\frac{{1}}{{{value}}}", f"{value}i", f"{value}x"]
    return Case("whole", str(value), right, wrong)

def fraction(dice: random.Random) -> Case:
    value = Fraction(dice.randint(1, 40), dice.choice([3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 20]))
    while value.denominator == 1:
        value += Fraction(1, 7)
    p, q = value.numerator, value.denominator
    right = [
        rf"\frac{{{p}}}{{{q}}}", rf"\dfrac{{{p}}}{{{q}}}", f"{p}/{q}", rf"\tfrac{{{2 * p}}}{{{2 * q}}}",
        rf"{p}\div {q}", rf"\frac{{-{p}}}{{-{q}}}", rf"-\frac{{-{p}}}{{{q}}}", rf"y=\frac{{{p}}}{{{q}}}",
    ]
    if p > q:
        right += [rf"{p // q}\frac{{{p % q}}}{{{q}}}", f"{p // q} {p % q}/{q}"]
    if q in (4, 8, 16, 20, 5):
        right += [f"{p / q}", f"{p / q}0"]
    others = [(p + 1, q), (p, q + 1), (q, p), (p, q * 10), (p - 1, q), (p + q, q)]
    wrong = [rf"\frac{{{a}}}{{{b}}}" for a, b in others if b and Fraction(a, b) != value]
    wrong += [f"-{p}/{q}", str(p), str(q), f"{p // q}", f"{round(p / q, 4)}1", f"{p},{q}", f"{p}:{q + 1}"]
    return Case("fraction", rf"\frac{{{p}}}{{{q}}}", right, [each for each in wrong if each != f"{p / q}"])

def decimal(dice: random.Random) -> Case:
    hundredths = dice.randint(1, 9999)
    while hundredths % 10 == 0:
        hundredths += 1
    text = f"{hundredths / 100:.2f}"
    small = 10 ** -dice.randint(3, 20)
    right = [
        text, text + "0", rf"\frac{{{hundredths}}}{{100}}", f"{hundredths}/100", f"{hundredths}e-2",
        rf"{hundredths}\times 10^{{-2}}", rf"{hundredths} \cdot 10^{{-2}}",
    ]
    wrong = [
        f"{hundredths / 1000}", f"{hundredths / 10}", f"-{text}", f"{text}1", str(hundredths), f"{hundredths}e-3",
    ]
    wrong += [f"{hundredths / 100 + 0.01:.2f}", repr(small), rf"{hundredths}\times 10^{{-20}}"]
    return Case("decimal", text, right, wrong)

def surd(dice: random.Random) -> Case:
    a, b = dice.randint(2, 12), dice.choice([2, 3, 5, 6, 7, 10, 11, 13])
    right = [
        rf"{a}\sqrt{{{b}}}", rf"{a}\sqrt{b}" if b < 10 else rf"{a} \sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}",
        f"{a}√{b}", rf"{a} \cdot \sqrt{{{b}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}", rf"{a}*{b}^{{1/2}}",
        f"{a}sqrt({b})",
    ]
    wrong = [
        rf"{a + 1}\sqrt{{{b}}}", rf"{a}\sqrt{{{b + 1}}}", rf"{a}\sqrt[3]{{{b}}}", rf"-{a}\sqrt{{{b}}}", str(a),
        str(b), rf"{a}+\sqrt{{{b}}}", rf"{a * b}", rf"{b}\sqrt{{{a + b}}}", f"{(a * a * b) ** 0.5:.6f}",
    ]
    return Case("surd", rf"{a}\sqrt{{{b}}}", right, wrong)

def circle(dice: random.Random) -> Case:
    a, b = dice.randint(2, 30), dice.choice([1, 1, 7, 11])
    reference = rf"{a}\pi" if b == 1 else rf"\frac{{{a}\pi}}{{{b}}}"
    right = [
        reference, rf"\pi\cdot {a}" if b == 1 else rf"\frac{{{a}}}{{{b}}}\pi", f"{a}π" if b == 1 else f"{a}π/{b}",
        f"{a}pi" if b == 1 else f"{a}pi/{b}", f"{a}*pi/{b}",
    ]
    wrong = [
        str(a), rf"{a + 1}\pi", rf"-{reference}", rf"{a}\pi^2", f"{a * 3.14159 / b:.5f}", rf"\frac{{\pi}}{{{a}}}",
    ]
    return Case("circle", reference, right, wrong)

def complex_number(dice: random.Random) -> Case:
    a, b = dice.randint(1, 20), dice.randint(2, 20)
    while a == b:
        b += 1
    right = [f"{a}+{b}i", f"{b}i+{a}", f"{a} + {b} i", f"{a}.0+{b}.0i", rf"{a}+i\cdot {b}", rf"z={a}+{b}i"]
    wrong = [
        f"{a}-{b}i", f"-{a}+{b}i", f"{b}+{a}i", str(a), str(b), f"{a + b}", f"{a}+{b}", f"{a}+{b + 1}i", f"{a}{b}i",
    ]
    return Case("complex", f"{a}+{b}i", right, wrong)

def polynomial(dice: random.Random) -> Case:
    a, b = dice.randint(1, 9), dice.randint(10, 15)
    total, product = a + b, a * b
    right = [
        f"x^2+{total}x+{product}", f"(x+{a})(x+{b})", f"(x + {b}) (x + {a})", f"{product}+{total}x+x^{{2}}",
        rf"x^2 + {total} x + {product}", f"x² + {total}x + {product}", f"x**2+{total}*x+{product}",
        f"x(x+{total})+{product}",
    ]
    wrong = [
        f"x^2+{total}x+{product + 1}", f"x^2-{total}x+{product}", f"x^3+{total}x+{product}", f"(x-{a})(x-{b})",
        f"(x+{a})(x+{b + 1})", str(product), f"x^2+{total}x", f"y^2+{total}y+{product}", f"{total}x+{product}",
    ]
    return Case("polynomial", f"x^2+{total}x+{product}", right, wrong)

def several(dice: random.Random) -> Case:
    a, b, c = dice.sample(range(-20, 40), 3)
    right = [
        f"{a},{b},{c}", f"{c}, {a}, {b}", rf"\{{{a},{b},{c}\}}", rf"{a}, {b} \text{{ and }} {c}", f"{b}, {c}, {a}.",
        rf"\boxed{{{a}}}, \boxed{{{b}}}, \boxed{{{c}}}",
    ]
    wrong = [
        f"{a},{b}", f"{a},{b},{c},{c + 1}", f"{a},{b},{c + 1}", str(a), str(c), f"{a},{b},{b}", f"{-a - 1},{b},{c}",
        f"{a + b + c}" if a + b + c not in (a, b, c) else "9999",
    ]
    return Case("several", f"{a}, {b}, {c}", right, wrong)

def point(dice: random.Random) -> Case:
    a, b = dice.sample(range(-20, 40), 2)
    right = [
        f"({a},{b})", f"({a}, {b})", rf"\left({a},{b}\right)", rf"( {a} , {b} )", rf"\langle {a},{b}\rangle",
        rf"P=({a},{b})",
    ]
    wrong = [
        f"({b},{a})", f"({a},{b + 1})", f"({a},{b},0)", str(a), str(b), f"({-a - 1},{b})", f"[{a},{b}]",
        rf"\{{{a},{b}\}}",
    ]
    return Case("point", f"({a},{b})", right, wrong)

def interval(dice: random.Random) -> Case:
    a = dice.randint(-20, 20)
    b = a + dice.randint(1, 20)
    right = [
        f"[{a},{b})", rf"{a} \le x < {b}", f"{a}<=x<{b}", rf"\left[{a}, {b}\right)", rf"x \in [{a},{b})",
        rf"{b}>x\geq {a}", f"{a} ≤ x < {b}", rf"x\ge {a} \text{{ and }} x<{b}",
    ]
    wrong = [
        f"({a},{b})", f"[{a},{b}]", f"[{a},{b + 1})", f"[{a - 1},{b})", rf"{a}<x<{b}", f"x<{b}", str(a), str(b),
        rf"(-\infty,{b})", rf"[{a},\infty)", rf"x<{a} \text{{ or }} x\ge {b}", f"({a},{b}]",
    ]
    return Case("interval", f"[{a},{b})", right, wrong)

def outside(dice: random.Random) -> Case:
    a = dice.randint(-20, 20)
    b = a + dice.randint(1, 20)
    reference = rf"(-\infty,{a})\cup({b},\infty)"
    right = [
        reference, rf"x<{a} \text{{ or }} x>{b}", rf"({b},\infty)\cup(-\infty,{a})", f"(-∞,{a})\u222a({b},∞)",
        rf"x \in (-\infty, {a}) \cup ({b}, +\infty)",
    ]
    wrong = [
        rf"(-\infty,{a}]\cup({b},\infty)", rf"({a},{b})", rf"x<{a}", rf"(-\infty,{b})\cup({a},\infty)", str(a),
        rf"(-\infty,{a})", rf"x<{a - 1} \text{{ or }} x>{b}", rf"[{a},{b}]",
    ]
    return Case("outside", reference, right, wrong)

def length(dice: random.Random) -> Case:
    a = dice.randint(2, 90)
    right = [
        rf"{a}\text{{ cm}}", f"{a} cm", f"{a}cm", str(a), rf"{a} \mathrm{{cm}}", f"{a} centimeters",
        rf"{a}\ \text{{cm}}",
    ]
    wrong = [
        rf"{a}\text{{ m}}", rf"{a + 1}\text{{ cm}}", rf"{a}\text{{ kg}}", rf"{a}\text{{ cm}}^2",
        rf"{a} cm, {a + 1} cm", rf"-{a}\text{{ cm}}", rf"\frac{{{a}}}{{2}}\text{{ cm}}", f"{a} km",
    ]
    return Case("length", rf"{a}\text{{ cm}}", right, wrong)

def duration(dice: random.Random) -> Case:
    hours, minutes = dice.randint(1, 9), dice.randint(1, 59)
    reference = rf"{hours}\text{{ hours }}{minutes}\text{{ minutes}}"
    right = [
        reference, f"{hours} hours and {minutes} minutes", f"{60 * hours + minutes} minutes",
        f"{hours} hours, {minutes} minutes",
    ]
    wrong = [
        f"{hours} hours", str(hours), f"{minutes} minutes", f"{hours} hours {minutes + 1} minutes", str(minutes),
        f"{hours + 1} hours {minutes} minutes", f"{hours} minutes {minutes} hours",
        f"{60 * hours + minutes + 1} minutes",
    ]
    return Case("duration", reference, right, [each for each in wrong if hours != minutes or "minutes" not in each])

def clock(dice: random.Random) -> Case:
    hours, minutes = dice.randint(1, 11), dice.randint(10, 59)
    reference = rf"{hours}:{minutes}\text{{ p.m.}}"
    right = [reference, f"{hours}:{minutes} pm", f"{hours}:{minutes}", f"{hours}:{minutes} PM"]
    wrong = [
        f"{hours}:{minutes} am", f"{hours + 1}:{minutes}", f"{2 * hours}:{2 * minutes}", f"{hours}", str(minutes),
        f"{hours}:{10 + (minutes - 9) % 50} pm" if 10 + (minutes - 9) % 50 != minutes else "0:00",
        rf"\frac{{{hours}}}{{{minutes}}}",
    ]
    return Case("clock", reference, right, wrong)

def ratio(dice: random.Random) -> Case:
    a, b, c = dice.sample([2, 3, 5, 7, 11, 13], 3)
    right = [f"{a}:{b}:{c}", f"{2 * a}:{2 * b}:{2 * c}", f"{a} : {b} : {c}"]
    wrong = [
        f"{a}:{c}:{b}", f"{a}:{b}", f"{a}:{b}:{c + 1}", f"{a}", f"{a},{b},{c}", f"{a}:{b * c}",
        rf"\frac{{{a}}}{{{b}}}",
    ]
    return Case("ratio", f"{a}:{b}:{c}", right, wrong)

def numeral(dice: random.Random) -> Case:
    text = "".join(dice.choice("1234567") for _ in range(dice.randint(2, 5)))
    right = [f"{text}_8", f"{text}_{{8}}", text]
    wrong = [f"{text}_9", f"{text}_{{10}}", f"{text[::-1]}1_8", f"{text}0_8", "8", f"1{text}"]
    return Case("numeral", f"{text}_8", right, wrong)

def residue(dice: random.Random) -> Case:
    m = dice.randint(5, 20)
    r = dice.randint(1, m - 2)
    reference = rf"x\equiv {r}\pmod {{{m}}}"
    right = [reference, rf"x \equiv {r} \pmod{{{m}}}", rf"x\equiv {r + m} \pmod{{{m}}}"]
    wrong = [
        rf"x\equiv {r + 1}\pmod {{{m}}}", rf"x\equiv {r}\pmod {{{m + 1}}}", str(r), str(m),
        rf"y\equiv {r + 1} \pmod {{{m}}}",
    ]
    return Case("residue", reference, right, wrong)

def angles(dice: random.Random) -> Case:
    q = dice.choice([3, 4, 5, 6, 8, 12])
    reference = rf"\frac{{\pi}}{{{q}}} + 2\pi k, k \in \mathbb{{Z}}"
    right = [
        reference, rf"x = \frac{{\pi}}{{{q}}} + 2\pi n, n \in \mathbb{{Z}}",
        rf"2k\pi + \frac{{\pi}}{{{q}}}, k\in\mathbb{{Z}}", rf"\frac{{\pi}}{{{q}}} - 2\pi k, k \in \mathbb{{Z}}",
    ]
    wrong = [
        rf"\frac{{\pi}}{{{q + 1}}} + 2\pi k, k \in \mathbb{{Z}}",
        rf"\frac{{\pi}}{{{q}}} + \pi k, k \in \mathbb{{Z}}", "2",
        rf"-\frac{{\pi}}{{{q}}} + 2\pi k, k \in \mathbb{{Z}}", rf"\frac{{\pi}}{{{q}}}",
        rf"\frac{{\pi}}{{{q}}} + 2\pi k, k \in \mathbb{{N}}",
    ]
    return Case("angles", reference, right, wrong)

def system(dice: random.Random) -> Case:
    a, b = dice.sample(range(-9, 20), 2)
    reference = rf"\begin{{cases}}x={a}\\y={b}\end{{cases}}"
    right = [
        reference, f"x={a}, y={b}", rf"y={b} \text{{ and }} x={a}",
        rf"\left\{{\begin{{array}}{{l}}x={a}\\y={b}\end{{array}}\right.",
    ]
    wrong = [
        rf"\begin{{cases}}x={b}\\y={a}\end{{cases}}", f"x={a}, y={b + 1}", str(b), str(a), f"x={a}", f"x={b}, y={a}",
    ]
    return Case("system", reference, right, wrong)

def pieces(dice: random.Random) -> Case:
    a, b = dice.sample(range(1, 20), 2)
    made = r"\begin{{cases}}{0}&x>0\\{1}&x\le 0\end{{cases}}"
    right = [made.format(f"{a}x", b), r"f(x)=" + made.format(f"{a}x", b), made.format(f"{a} x", f"{b}.0")]
    wrong = [made.format(f"{b}x", a), made.format(f"{a}x", b + 1), made.format(f"-{a}x", b), str(b), f"{a}x"]
    return Case("pieces", made.format(f"{a}x", b), right, wrong)

def matrix(dice: random.Random) -> Case:
    a, b, c, d = dice.sample(range(-9, 20), 4)
    made = r"\begin{{{k}}}{0}&{1}\\{2}&{3}\end{{{k}}}"
    right = [made.format(a, b, c, d, k="pmatrix"), made.format(a, b, f"{c}.0", d, k="bmatrix")]
    wrong = [
        made.format(b, a, c, d, k="pmatrix"), made.format(a, b, c, d + 1, k="pmatrix"), str(d), f"{a},{b},{c},{d}",
        made.format(a, c, b, d, k="pmatrix"),
    ]
    return Case("matrix", made.format(a, b, c, d, k="pmatrix"), right, wrong)

def line(dice: random.Random) -> Case:
    m, b = dice.randint(2, 9), dice.randint(1, 20)
    right = [f"y={m}x+{b}", f"y - {m}x = {b}", f"{m}x - y + {b} = 0", f"y = {b} + {m}x", f"2y={2 * m}x+{2 * b}"]
    wrong = [
        f"y={m}x-{b}", f"y={m + 1}x+{b}", f"x={m}y+{b}", str(b), f"y={b}x+{m + b}", f"y>{m}x+{b}", f"{m}x+y+{b}=0",
    ]
    return Case("line", f"y={m}x+{b}", right, wrong)

def named(dice: random.Random) -> Case:
    words = ["Paris", "east", "no", "Monday", "isosceles", "ellipse", "yes", "seven", "Thursday", "Helen"]
    word = dice.choice(words)
    right = [
        word, rf"\text{{{word}}}", word.lower(), rf"\text{{{word}}}.", rf"\textbf{{{word}}}", rf"\mathrm{{{word}}}",
    ]
    wrong = [each for each in words if each != word]
    wrong += ["".join(dice.sample(word, len(word)))[::-1] + "q", word[:-1], "8"]
    return Case("named", word, right, [*wrong, word[::-1]])

def option(dice: random.Random) -> Case:
    letter = dice.choice("ABCDE")
    value = dice.randint(10, 99)
    right = [
        letter, f"({letter})", f"{letter}.", rf"\text{{{letter}}}", rf"\text{{({letter})}}", f"{letter}. {value}",
        f"{letter}) {value}",
    ]
    other = "ABCDE"[("ABCDE".index(letter) + 1) % 5]
    wrong = [
        other, f"({other})", f"{other}. {value}", str(value), f"{letter}{other}", f"{letter}, {other}",
        rf"\text{{{other}) {letter}}}",
    ]
    return Case("option", letter, right, wrong)

def tiny(dice: random.Random) -> Case:
    power = dice.randint(15, 40)
    reference = rf"\frac{{1}}{{3^{{{power}}}}}"
    right = [reference, rf"3^{{-{power}}}", rf"\frac{{3}}{{3^{{{power + 1}}}}}", rf"\left(\frac13\right)^{{{power}}}"]
    wrong = [
        rf"\frac{{1}}{{3^{{{power + 1}}}}}", rf"\frac{{2}}{{3^{{{power}}}}}", "0", rf"\frac{{1}}{{2^{{{power}}}}}",
        f"1e-{power}",
    ]
    return Case("tiny", reference, right, wrong)

def functions(dice: random.Random) -> Case:
    a = dice.randint(2, 9)
    reference = rf"\ln {a}"
    right = [
        reference, f"ln({a})", rf"\ln({a})", rf"\frac12 \ln {a * a}", rf"\log_{{e}} {a}", rf"-\ln\frac{{1}}{{{a}}}",
    ]
    wrong = [rf"\ln {a + 1}", str(a), rf"\log_{{10}} {a}", rf"-\ln {a}", rf"\sin {a}", f"e^{a}"]
    return Case("functions", reference, right, wrong)

def share(dice: random.Random) -> Case:
    eighths = dice.choice([1, 3, 5, 7])
    text = f"{12.5 * eighths:g}"
    right = [rf"{text}\%", text, f"{text} percent", rf"\frac{{{eighths}}}{{8}}", f"{eighths / 8}", rf"{text} \%"]
    wrong = [
        f"{float(text) + 1:g}", rf"{float(text) / 100:g}\%", rf"\frac{{{eighths}}}{{7}}", f"{float(text) * 100:g}",
        rf"-{text}\%",
    ]
    return Case("share", rf"{text}\%", right, wrong)

def root_pair(dice: random.Random) -> Case:
    a, b = dice.randint(2, 9), dice.choice([2, 3, 5, 7])
    reference = rf"{a} \pm \sqrt{{{b}}}"
    right = [reference, rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}", rf"x={a}\pm\sqrt{{{b}}}", f"{a} ± √{b}"]
    wrong = [rf"{a}+\sqrt{{{b}}}", rf"{a + 1} \pm \sqrt{{{b}}}", str(a), rf"\pm\sqrt{{{b}}}", rf"{a}\pm {b}"]
    return Case("root pair", reference, right, wrong)

def huge(dice: random.Random) -> Case:
    base, power = dice.choice([2, 3, 5, 7, 10]), dice.randint(60, 2500)
    reference = rf"{base}^{{{power}}}-1"
    right = [reference, rf"{base}\cdot {base}^{{{power - 1}}}-1", rf"-1+{base}^{{{power}}}"]
    wrong = [
        f"{base}^{{{power}}}+1", f"{base}^{{{power}}}", f"{base}^{{{power}-1}}", rf"\frac{{{base}^{{{power}}}-1}}{{2}}",
    ]
    return Case("huge", reference, right, wrong)

def grouped(dice: random.Random) -> Case:
    a, b, c = dice.sample(range(2, 10), 3)
    reference = rf"\frac{{{a}}}{{{b}{c}}}"
    right = [reference, f"{a}/{b}{c}", rf"\frac{{{2 * a}}}{{{2 * (10 * b + c)}}}"]
    wrong = [
        rf"\frac{{{a}{b}}}{{{c}}}", rf"\frac{{{a}}}{{{b}}}{c}", rf"\frac{a}{b}{c}", f"{a} {b}/{c}", f"{a}{b}/{c}",
        rf"\begin{{pmatrix}}{a}\\{b}{c}\end{{pmatrix}}",
    ]
    return Case("grouped", reference, right, wrong)

KINDS: tuple[Callable[[random.Random], Case], ...] = (
    whole, fraction, decimal, surd, circle, complex_number, polynomial, several, point, interval, outside, length,
    duration, clock, ratio, numeral, residue, angles, system, pieces, matrix, line, named, option, tiny, functions,
    share, root_pair, huge, grouped,
)

BOXED = (
    r"So \boxed{%s}.", r"Thus the answer is $\boxed{%s}$.", r"<think>\boxed{1} or 2?</think> It is \boxed{%s}",
    r"\[\boxed{%s}\]",
)
"""Ways to state an answer of any kind."""
BARE = (r"The answer is $%s$.", r"<answer>%s</answer>", r"Final answer: $%s$", r"We find \(%s\).", "#### %s")
"""Ways to state an answer that holds no box and no dollar sign."""

def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield cases of every kind in turn."""
    dice = random.Random(seed)
    for index in range(count):
        yield KINDS[index % len(KINDS)](dice)

def stated(answer: str, dice: random.Random) -> str:
    """Return a response that states an answer."""
    bare = "boxed" not in answer and "$" not in answer and "\n" not in answer
    forms = (*BOXED, *BARE) if bare else BOXED if "boxed" not in answer else ("It is %s",)
    return dice.choice(forms) % answer
