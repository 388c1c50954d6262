"""References of competition problems."""

# fmt: off
TYPICAL = (
    r"\frac{3}{56}", r"(3, \frac{\pi}{2})", r"p - q", r"\frac{14}{3}", r"9", r"\text{Evelyn}", r"42", r"27",
    r"90^\circ", r"3\sqrt{13}", r"4", r"2220", r"284", r"5", r"\sqrt{51}", r"6 - 5i", r"-50", r"\pi", r"28", r"3",
    r"6+9i", r"13535", r"x=5", r"10", r"1,-2", r"144", r"78", r"-2 + 7i", r"225", r"52_8", r"11\sqrt2", r"720",
    r"\frac{243}{625}", r"-125", r"3, 5, 7", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
    r"(-\infty,2) \cup (3,\infty)", r"\text{odd}", r"x^3+3x-6", r"70 \sqrt{2}", r"\frac{5}{3}", r"12\frac{1}{2}",
    r"(5,\infty)", r"8n^2 + 4n + 1", r"\frac{270}7\text{ degrees}", r"[-2,7]", r"y = 2x+3", r"2k",
    r"\left( \frac{3}{2}, -13 \right)", r"\{1\pm\sqrt{5},-2\}", r"70,\!000", r"$18.90", r"0.36^\circ",
    r"\dfrac{9}{7}", r"158", r"1\frac{4}{5}", r"\text{(C)}", r"-\frac{35}{9}", r"4210_{5}",
    r"2\sqrt{5}\text{ inches}", r"1 \text{ or } 4", r"(0,9)\cup (9,36)", r"\left[\frac12,1\right]",
    r"\begin{pmatrix} 2 & 0 \\ 0 & 3\end{pmatrix}", r"f^{-1}(x)=\frac{x-3}{2}", r"16x^2+24x+10x+15", r"a+5", r"-2,1",
    r"\log_{10} 2", r"e^2", r"\frac{1}{2^{98}}", r"\sqrt[3]{4}", r"\cot x", r"\sec^2\theta", r"15\mbox{ cm}^2",
    r"10\%", r"3:2", r"\frac{\sqrt{3}}{3}", r"2^{10}", r"6\pi\sqrt{2}", r"1.25 \times 10^6", r"\infty",
    r"n \equiv 3 \pmod{5}", r"\tan^{-1} 2", r"x \in (-2,3]", r"3x^2 - 2xy + y^2 = 7", r"|x|<3", r"\frac{a}{b+c}",
    r"(x-2)^2+(y+3)^2=16", r"0 < k < \frac14", r"\mathbf{i}+2\mathbf{j}", r"\vec{a}\cdot\vec{b}",
    r"\frac{n(n+1)}{2}", r"2^{n+1}-1", r"a_n = 3n-1", r"C_5^2", r"\sin\left(2x+\frac{\pi}{6}\right)", r"k\pi",
    r"\left\{x \mid -1<x<2\right\}", r"(1, 0), (0, 1)", r"AC=5, BC=12", r"\angle A = 60^\circ", r"x_1 = 2, x_2 = 3",
    r"12!", r"7\text{ a.m.}", r"100 \text{ km/h}", r"3\text{ m/s}^2", r"30\text{ minutes}", r"\$32,\!348",
    r"6\text{ and }8", r"\sqrt{2}+\sqrt{3}", r"\pm 3", r"\frac{1\pm\sqrt5}{2}", r"y^4-2y^3+7y^2+y-5", r"u_n",
    r"(2,\ -3)", r"\ln 2 - 1", r"2e^{-x}", r"\cos 2x", r"\cos^2 x", r"0.\overline{36}", r"\lambda > 2",
    r"m \ge -1 \text{ and } m \ne 0",
)
"""References of the forms that competition problems have."""
