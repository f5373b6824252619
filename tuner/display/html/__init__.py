"""Parts of the HTML report."""
