//! Tests that run beside each other get no server of another's.

use crate::support::silent::block_of_ports;

#[test]
fn two_processes_have_no_port_in_common() {
    let (_name, ours) = block_of_ports();
    let (_other_name, theirs) = block_of_ports();
    assert!(ours.end <= theirs.start || theirs.end <= ours.start);
}
