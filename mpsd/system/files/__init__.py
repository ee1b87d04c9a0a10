"""Files and directories: whole files, stores, paths that only mpsd may change, ACLs, and notifications about them."""
