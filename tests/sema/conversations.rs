//! What a user of `sema` sees in a shell: plays the transcripts in `tests/sema/conversations/`.

use crate::support::transcript::{transcripts, Folder};
use crate::support::Scheme;

const FOLDER: Folder = Folder {
    path: "tests/sema/conversations",
    scheme: Scheme::Plain,
    start: |_, _| unreachable!("sema needs no server"),
    other: || None,
};

transcripts! {
    FOLDER;
    errors
    nesting
    records
    run
    slots
    system
    tables
    waiting
}
