// The page's own script. Everything here adds to pages that work without it.
