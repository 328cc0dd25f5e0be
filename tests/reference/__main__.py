"""Write the pages of docs/reference anew: python -m tests.reference"""

from tests.reference import FOLDER, pages

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in pages().items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
