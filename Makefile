.PHONY: sync format lint typecheck test

sync: ## install the whole workspace as locked
	uv sync --locked

format: ## rewrite the code in its one format
	uv run ruff check --fix .
	uv run ruff format .

lint: ## what CI looks at, but for types
	uv run ruff check .
	uv run ruff format --check .
	uv run lint-imports --no-cache

typecheck:
	uv run mypy

test:
	uv run pytest
