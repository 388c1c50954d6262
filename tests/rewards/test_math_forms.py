"""Spellings of answers by kind: right spellings, and wrong answers close to them, derived by hand."""

import random
import time

import pytest

from jaxrlhf.rewards.mathematics import same_answer

# fmt: off
FORMS = {
    # Intervals and conditions.
    "(2,5)": (["]2,5[", "]2;5[", r"x\in]2,5[", r"\left]2,5\right[", "2<x, x<5"], ["]5,2[", "]2,5]", "[2,5[",
        r"2<x\le5"]),
    "[2,5)": (["[2,5[", r"\{x: 2\le x<5\}", r"\left\{x \;\middle|\; 2\le x<5\right\}", r"x<5,\ x\ge 2"], ["]2,5[",
        "[5,2["]),
    r"(-\infty,-1)\cup(1,\infty)": (
        [r"]-\infty,-1[\cup]1,+\infty[", r"\mathbb{R}\setminus[-1,1]", "x<-1, x>1"],
        [r"\mathbb{R}\setminus(-1,1)", r"x<-1 \text{ and } x>1", r"\mathbb{R}\setminus\{-1,1\}"]),
    r"(-1,1)\cup(1,3)": ([r"-1<x<3, x\ne 1", r"(-1,3)\setminus\{1\}"], ["(-1,3)", r"-1<x<3, x\ne 2"]),
    r"x>1 \text{ and } y>2": (["y>2, x>1"], ["x>2", "x>1", "y>2"]),
    r"x\ne 2": ([r"\mathbb{R}-\{2\}", r"x\in\mathbb{R}\backslash\{2\}", r"x\in\mathbb{R}, x\not=2"], ["x=2",
        r"\mathbb{R}-\{-2\}"]),
    r"(0,\infty)": ([r"\mathbb{R}^+", r"\mathbb{R}_{>0}", r"]0,\infty["], [r"\mathbb{R}", r"[0,\infty[",
        r"\mathbb{Z}^+"]),
    "a<b<c": (["c>b>a"], ["c<b<a", "a>b>c"]),
    r"\sqrt[3]{2}, \sqrt[3]{4}": ([r"\sqrt[3]{4}, \sqrt[3]{2}"], [r"\sqrt[3]{2}, \sqrt{4}"]),  # brackets of no interval
    # Sets.
    r"\{1,2,3\}": ([r"\{1,2\}\cup\{3\}", r"\{3\}\cup\{2,1\}"], [r"\{1,2\}\cup\{4\}", "[1,3]"]),
    r"\emptyset": ([r"\text{There are no solutions}", r"\text{the empty set}"], [r"\{\emptyset\}", "0"]),
    # Systems and coordinates.
    "x=2, y=-1": (
        [r"\left\{\begin{aligned}x&=2\\y&=-1\end{aligned}\right.", r"\begin{array}{c}x=2\\y=-1\end{array}", "(2,-1)",
         r"x=2\quad y=-1", "(x,y)=(2,-1)", r"\begin{aligned}x&=2\\y&=-1\end{aligned}"],
        [r"x=2 \text{ or } y=-1", "(-1,2)", "(y,x)=(2,-1)", "[2,-1]", r"x=-1\quad y=2"]),
    "(x,y)=(2,-1)": (["x=2, y=-1", "y=-1, x=2"], ["x=-1, y=2", "x=2"]),
    r"\begin{cases}x^2&x\ge0\\-x&x<0\end{cases}": (
        [r"\begin{cases}x^2&x\ge0\\-x&\text{otherwise}\end{cases}"],
        [r"\begin{cases}x^2&x>0\\-x&\text{otherwise}\end{cases}"]),
    # Vectors and matrices.
    "(1,-2,3)": (
        [r"\mathbf{i}-2\mathbf{j}+3\mathbf{k}", r"3\hat{k}+\hat{i}-2\hat{j}", r"(1,-2,3)^T",
         r"\begin{pmatrix}1&-2&3\end{pmatrix}^T"],
        [r"\mathbf{i}+2\mathbf{j}+3\mathbf{k}", r"\mathbf{i}-2\mathbf{j}", "2"]),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
        ["[[1,2],[3,4]]", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}^T"],
        ["[[1,3],[2,4]]", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T"]),
    # Residue classes and families.
    r"x\equiv 3\pmod 7": (
        ["x≡3 (mod 7)", r"x\equiv3\ (\text{mod }7)", r"3\pmod 7", r"x=7k+3, k\in\mathbb{Z}"],
        [r"4\pmod 7", r"x=14k+3, k\in\mathbb{Z}", r"x=7k+3, k\in\mathbb{N}", "3"]),
    r"n\equiv 1, 4\pmod 5": (
        [r"n\equiv 4,1\pmod5", r"n\equiv1\text{ or }4\pmod5", r"n\equiv1\pmod5\text{ or }n\equiv4\pmod5"],
        [r"n\equiv1\pmod5", r"n\equiv1,3\pmod5", r"n\equiv1,4\pmod{10}"]),
    r"\frac{\pi}{6}+k\pi, k\in\mathbb{Z}": (
        [r"k\pi+\frac\pi6\ (k\in\mathbb{Z})", r"\{\frac\pi6+k\pi\mid k\in\mathbb{Z}\}",
         r"30^\circ+180^\circ n, n\in\mathbb{Z}",
         r"\frac\pi6+k\pi, k\text{ is an integer}", r"\frac\pi6+k\pi\text{ where }k\in\mathbb{Z}",
         r"\frac\pi6+n\pi\text{ for any integer }n"],
        [r"\{\frac\pi6+2k\pi\mid k\in\mathbb{Z}\}", r"60^\circ+180^\circ n, n\in\mathbb{Z}", r"\{\frac\pi6\}"]),
    # Units, prefixes and money.
    r"5\text{ m/s}": (
        ["5 m/s", "5", r"5\,\text{m}\,\text{s}^{-1}", r"5\frac{\text{m}}{\text{s}}", r"5\,\mathrm{m\cdot s^{-1}}",
         "18 km/h"],
        ["5 m", "5 km/h", "5 s/m", "5x/s", r"5\text{ m/s}^2"]),
    r"2.5\text{ km}": (["2500 m", "2.5 km", r"250000\text{ cm}"], ["2500 km", "250 m", "2500", "2.5 m"]),
    r"250\text{ mL}": (["0.25 L", r"250\text{ cm}^3"], ["0.25 mL", "250 L"]),
    r"12\text{ cm}^2": ([r"1200\text{ mm}^2", "12 sq. cm"], [r"120\text{ mm}^2", "12 cm"]),
    r"5\text{ GHz}": (["5000 MHz", r"5\times10^9\text{ Hz}"], ["5 MHz", "5000 kHz"]),
    r"4.7\ \mu\text{F}": (["4.7", "4.7 µF"], ["4.7 F"]),
    r"90\text{ minutes}": (["1 h 30 min", "1.5 hours"], ["1 h 20 min", "1.3 hours"]),
    r"5\text{ ft }4\text{ in}": (["64 in", "5 feet 4 inches"], ["54 in", "5.4 ft"]),
    r"100^\circ\text{C}": (["100", r"100^\circ\mathrm{C}", "100 degrees Celsius"], ["100°F", "10°C"]),
    r"-45^\circ": (["-45", "-45°", r"-\frac{\pi}{4}"], ["45", "45°"]),
    r"3.6\times10^6\text{ J}": (["3.6 MJ", "3600 kJ"], ["3.6 mJ", "3.6 kJ"]),
    r"50\text{ kg}\cdot\text{m/s}": ([r"50\text{ kg m/s}", "50"], [r"50\text{ kg}\cdot\text{m}"]),
    "A(1,2)": (["(1,2)", "A=(1,2)"], ["A(2,1)", "3A"]),
    "A(1,2), B(3,4)": (["B(3,4), A(1,2)"], ["A(3,4), B(1,2)", "A(1,2)"]),
    "(x-2)(x+3)=0": (["x^2+x-6=0", "(x+3)(x-2)=0"], ["0", "(x-3)(x+2)=0"]),
    "0": (["x=0", "zero"], ["x(x-1)=0", "(x-1)(x+1)=0", r"\emptyset"]),
    "f(3)=4": (["4"], ["3"]),
    "y=4": (["4", "f(x)=4"], ["f(3)=4"]),
    r"\{1,3,2\}": (["1,2,3"], ["a=1, b=2, c=3"]),
    "[1,2]": ([r"1\le x\le2"], [r"\mathbf{i}+2\mathbf{j}"]),
    "(f+g)(x)=x^2": (["x^2"], ["x"]),
    "0.5 cm": (["0.5", "5 mm"], [r"50\%"]),
    "2": (["two"], ["two five", "two hundred five"]),
    "5 m": (["5m", r"m\cdot 5"], ["5", "m", "5n"]),  # letters may be variables
    "$0.75": (["75 cents", "75¢", "0.75", r"\$0.75"], ["0.75 cents", "75", "$75"]),
    r"\$12\text{ per hour}": ([r"\$12", r"\$12/\text{hour}", "12"], [r"\$12\text{ per day}", r"\$13"]),
    "0.08": ([r"8\%", "0.08"], [r"0.08\%", "8"]),
    r"0.08\%": (["0.08", "0.0008"], ["8", r"8\%"]),
    # Times, ratios, bases.
    "3:45 pm": (["15:45", "3:45"], ["3:45 am", "3:5", "16:45"]),
    "15:45": (["3:45 pm"], ["3:45", "3:45 am"]),
    "5:13:11": (["10:26:22"], ["5:11:13", "5:13"]),
    "1:05:30": (["1:05:30"], ["2:11:00", "1:05"]),
    "3:4": ([r"3\text{ to }4", r"3\colon4", "6 to 8"], [r"4\text{ to }3"]),
    "1011_2": ([r"(1011)_2"], [r"(1011)_3"]),
    # Words, ordinals, labels.
    "42": (
        [r"\text{forty-two}", r"\text{The answer is } 42", r"\text{Answer: 42}", r"42\checkmark"],
        [r"\text{forty-three}", r"\text{twenty-four}", r"\text{not }42", r"\text{Answer: 43}"]),
    "12 apples": (["twelve", "twelve apples"], ["twelve oranges"]),
    "3rd": (["third", "3", r"3^{\text{rd}}"], ["fourth", "3 km", "13th"]),
    "Yes": (["Yes!"], ["No!"]),
    "C": ([r"\text{Option C}", "Choice (C)", "option c"], [r"\text{Option D}", "Option C or D"]),
    # Notations of TeX and of other languages.
    r"\frac{17}{5}": ([r"{17 \over 5}"], [r"{5 \over 17}"]),
    r"\binom{10}{3}": ([r"{10 \choose 3}", r"\dbinom{10}{3}"], [r"{10 \choose 4}"]),
    r"6.02\times10^{23}": (["6.02 x 10^{23}", "6.02 x 10^23"], ["6.02 x 10^{22}"]),
    r"\frac17": [[r"0.\dot{1}4285\dot{7}"], [r"0.\dot{1}4285\dot{6}"]],
    "1234567": (["1'234'567", "1_234_567", "12,34,567"], ["1'234'568", "12,34,568"]),
    r"2\sqrt[3]{2}": (["2∛2"], ["2√2"]),
    r"\log_{10}5": ([r"\log 5", r"1-\log 2"], [r"\ln 5", r"\log_2 5"]),
    "2i": ([r"2\imath"], [r"-2\imath"]),
    r"\frac12+\frac{\sqrt3}{2}i": ([r"\operatorname{cis} 60^\circ"], [r"\operatorname{cis} 30^\circ"]),
    # Functions of another variable.
    "f(x)=x^2+1": (["f(t)=t^2+1", "y=x^2+1"], ["f(t)=x^2+1", "f(t)=t^2-1", "g(x)=x^2+1"]),
    r"f^{-1}(x)=\frac{x-3}{2}": ([r"f^{-1}(y)=\frac{y-3}{2}"], [r"f(y)=\frac{y-3}{2}"]),
}
"""Right and wrong spellings by reference."""
# fmt: on


@pytest.mark.parametrize("reference", FORMS)
def test_spellings_of_an_answer(reference):
    right, wrong = FORMS[reference]
    for text in [reference, *right]:
        assert same_answer("", rf"\boxed{{{text}}}", reference, {}) == 1, text
    for text in wrong:
        assert same_answer("", rf"\boxed{{{text}}}", reference, {}) == 0, text


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"So $x = 5$ or $x = 7$.", "5,7", 1),
        (r"The roots are $3$, $4$, and $5$.", "3,4,5", 1),
        (r"The roots are $3$ and $4$.", "4", 0),
        (r"<answer>$3$ or $4$</answer>", "4", 0),
        (r"Adding $1$ and $3$ gives $4$.", "4", 1),
        (r"With $n=2$, it is $4$.", "4", 1),
        (r"The answer is $4$, not $5$.", "4", 1),
        ("#### **42**", "42", 1),
        ("**No**", "No", 1),
        ("**(C)**", "C", 1),
        ("**D**", "C", 0),
        ("The answer is option C", "C", 1),
        ("<answer>The answer is 42</answer>", "42", 1),
        ("<answer>The answer is 43</answer>", "42", 0),
        ("The answer is forty-two.", "42", 1),
        ("The answer is 12 (twelve).", "12", 1),
        ("Answer: 5 meters per second", "5 m/s", 1),
        ("It costs $5.", "$5", 1),
        ("The answer is 5 cents.", "$5", 0),
    ],
)
def test_answers_in_sentences(response, answer, right):
    assert same_answer("", response, answer, {}) == right


def test_long_gaps_cost_little_time():
    start = time.thread_time()
    assert same_answer("", "so " + " " * 60_000 + "the answer is 7", "7", {}) == 1
    assert same_answer("", rf"\boxed{{{'( ,' * 600}}}", "7", {}) == 0
    assert time.thread_time() - start < 2.0


ONES, TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)


def in_words(value):
    """Return a number below 100 in words."""
    return ONES[value] if value < 20 else TENS[value // 10 - 2] + (f"-{ONES[value % 10]}" if value % 10 else "")


def made(dice):
    """Yield references with right spellings and wrong answers close to them, computed from numbers."""
    a = dice.randint(-9, 9)
    b = a + dice.randint(1, 9)
    yield f"({a},{b})", [f"]{a},{b}[", rf"x\in]{a};{b}["], [f"]{a},{b}]", f"[{a},{b}[", f"]{a},{b + 1}[", f"]{b},{a}["]
    v = dice.randint(2, 90)
    yield (
        rf"{v}\text{{ m/s}}",
        [f"{v} m/s", rf"{v}\,\mathrm{{m\,s^{{-1}}}}", rf"{v * 36 / 10:g}\text{{ km/h}}", rf"{v * 100}\text{{ cm/s}}"],
        [f"{v + 1} m/s", f"{v} m", rf"{v}\text{{ km/h}}", rf"{v}\text{{ m/s}}^2", f"-{v} m/s", f"{v} s/m"],
    )
    yield rf"{v}\text{{ km}}", [f"{v * 1000} m", f"{v} km"], [f"{v * 100} m", f"{v} m", f"{v * 1000}", f"{v * 1000} km"]
    yield f"${v}", [f"{v * 100} cents", f"{v}.00 dollars"], [f"{v} cents", f"{v * 100}", f"{v * 10} cents", f"-{v}"]
    p, q = dice.randint(2, 9), dice.randint(1, 9)
    yield (
        f"f(x)={p}x^2-{q}x",
        [f"f(t)={p}t^2-{q}t", f"{p}x^2-{q}x", f"y={p}x^2-{q}x"],
        [f"f(t)={p}t^2+{q}t", f"f(t)={p + 1}t^2-{q}t", f"g(x)={p}x^2-{q}x", f"f(t)={p}x^2-{q}x"],
    )
    n = dice.randint(13, 98)
    yield str(n), [in_words(n), rf"\text{{{in_words(n).replace('-', ' ')}}}"], [in_words(n - 1), in_words(n + 1)]
    hour, minute = dice.randint(1, 11), dice.randint(10, 59)
    yield (
        f"{hour}:{minute} pm",
        [f"{hour + 12}:{minute}", f"{hour}:{minute}"],
        [f"{hour + 12}:{minute - 1}", f"{hour + 11}:{minute}", f"{hour}:{minute} am"],
    )
    m = dice.randint(5, 30)
    r = dice.randint(0, m - 2)
    yield (
        rf"x\equiv {r}\pmod{{{m}}}",
        [rf"x={m}k+{r}, k\in\mathbb{{Z}}", rf"{r + m}\pmod{{{m}}}", f"x ≡ {r} (mod {m})"],
        [rf"x={m}k+{r + 1}, k\in\mathbb{{Z}}", rf"x={2 * m}k+{r}, k\in\mathbb{{Z}}", rf"{r + 1}\pmod{{{m}}}", str(r)],
    )
    x, y, z = dice.sample([-7, -5, -3, -2, 2, 3, 4, 6, 8, 9], 3)
    yield (
        f"x={x}, y={y}",
        [f"({x},{y})", f"(x,y)=({x},{y})", rf"x={x}\quad y={y}", rf"\begin{{aligned}}x&={x}\\y&={y}\end{{aligned}}"],
        [f"({y},{x})", f"(x,y)=({y},{x})", rf"x={x}\text{{ or }}y={y}", rf"x={y}\quad y={x}", f"({x},{y + 1})"],
    )
    yield (
        f"({x},{y},{z})",
        [rf"{x}\mathbf{{i}}{y:+}\mathbf{{j}}{z:+}\mathbf{{k}}", rf"({x},{y},{z})^T"],
        [rf"{y}\mathbf{{i}}{x:+}\mathbf{{j}}{z:+}\mathbf{{k}}", rf"{x}\mathbf{{i}}{y:+}\mathbf{{j}}"],
    )
    head, tail = dice.randint(10, 999), dice.randint(100, 999)
    yield f"{head}{tail}", [f"{head}'{tail}", f"{head}_{tail}"], [f"{head}'{1099 - tail}", str(head), str(tail)]


def check_made(seed, rounds):
    dice = random.Random(seed)
    for _ in range(rounds):
        for reference, right, wrong in made(dice):
            assert [text for text in right if not same_answer("", rf"\boxed{{{text}}}", reference, {})] == [], reference
            assert [text for text in wrong if same_answer("", rf"\boxed{{{text}}}", reference, {})] == [], reference


def test_spellings_made_from_numbers():
    check_made(0, 4)


@pytest.mark.slow
def test_spellings_made_from_numbers_at_length():
    check_made(1, 300)
