"""What needs packages that tccompile does not: `make doors` runs these tests with them, elsewhere they are skipped."""
