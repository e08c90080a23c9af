"""Draft head: it changes no token, learns in the update, and drafts only where that pays."""
