"""Plans for ranges of sizes: programs at some sizes → one program for all, with formulas in the place of numbers.

box       the sizes of a range, and at which of them things are looked at
fit       numbers at some sizes → a formula
alike     programs at some sizes → one, if they are alike but for their numbers
steps     which kernels run it at all sizes, and where the range is divided because others would be faster
"""
