"""Run the engine and its optimizer inside other trainers: one module a trainer, which needs that package."""
