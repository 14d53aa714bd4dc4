//! Locks on file systems in user space, under two paths at once, and on mount points.

use super::*;
use crate::support::mounts::Mount;
use crate::support::needs::Admin;

/// The status of `run` and `hold` for a lock that is held.
pub const BUSY: i32 = 75;

/// Waits for a lock that a killed guard has left; heartbeats come each second.
const AFTER_TWO_BEATS: [&str; 8] = ["run", "f", "--stale", "3", "-w", "30", "--", "true"];

/// A place on each file system in user space, under the name of the file system.
fn in_user_space(
    admin: Admin,
    [bindfs, mkntfs, ntfs_3g]: [Program; 3],
) -> Vec<(&'static str, Place, Mount)> {
    let mounts = [
        ("bindfs", Mount::bindfs(admin, &bindfs)),
        ("ntfs-3g", Mount::ntfs_3g(admin, &mkntfs, &ntfs_3g)),
    ];
    let in_mount = |(name, mount): (_, Mount)| (name, Place::within(&mount.path), mount);
    mounts.into_iter().map(in_mount).collect()
}

/// A path to the same directory under the other mount of two.
fn seen_in(place: &Place, directory: &Path) -> Place {
    let name = place.directory.file_name().expect("a name");
    Place::at(&directory.join(name))
}

#[test]
fn a_lock_in_user_space_has_one_holder_at_a_time() {
    let programs = needs!("bindfs", "mkntfs", "ntfs-3g");
    for (name, place, _mount) in in_user_space(needs!(admin), programs) {
        // The guard of the killed holder tells its command to end, and this one ignores that.
        let script = "trap '' TERM; exec sleep 1000";
        let (mut holder, pid) = place.started(&["--kill-after", "60"], script);
        for (arguments, status) in [
            (&["try", "f"][..], 1),
            (&["run", "f", "-n", "--", "true"], BUSY),
            (&["hold", "f", "-n"], BUSY),
            (&["wait", "f", "--timeout", "50ms"], 1),
            (&["status", "f"], 1),
        ] {
            assert_eq!(place.status(arguments), status, "{name}: {arguments:?}");
        }
        let _ = holder.kill();
        holder.wait().expect("a child");
        // Its command runs, and keeps the lock.
        let status = place.status(&["run", "f", "-n", "--", "true"]);
        kill_process(pid, Signal::KILL).expect("it runs");
        assert_eq!(status, BUSY, "{name}");
    }
}

#[test]
fn a_lock_in_user_space_is_kept_and_is_released() {
    let programs = needs!("bindfs", "mkntfs", "ntfs-3g");
    for (name, place, _mount) in in_user_space(needs!(admin), programs) {
        // Its heartbeat comes each second, and finds the lock in place.
        let script = "cat f > before; sleep 2.5; cat f > after";
        let output = place.sema(&["run", "f", "--stale", "3", "--", "sh", "-c", script]);
        assert_eq!(text(&output.stderr), "", "{name}");
        assert_eq!(output.status.code(), Some(0), "{name}");
        assert_ne!(place.read("before"), place.read("after"), "{name}");
        assert!(!place.path("f").exists(), "{name}");

        let (mut holder, pid) = place.started(&[], "exec sleep 1000");
        let _ = holder.kill();
        holder.wait().expect("a child");
        kill_process(pid, Signal::KILL).expect("it runs");
        eventually(PATIENCE, "both are gone", || is_gone(pid));
        // Another machine of the same snapshot would not see the process of a living holder.
        assert_eq!(
            place.status(&["run", "f", "-n", "--", "true"]),
            BUSY,
            "{name}"
        );
        assert_eq!(place.status(&AFTER_TWO_BEATS), 0, "{name}");

        place.write("f", &format!("pid={NO_PROCESS}\ntimestamp=1\n"));
        assert_eq!(place.status(&["run", "f", "-n", "--", "true"]), 0, "{name}");
        let pid = std::process::id().to_string();
        assert_eq!(place.status(&["try", "f", "--pid", &pid]), 0, "{name}");
        assert_eq!(place.status(&["try", "f"]), 1, "{name}");
        assert_eq!(place.status(&["release", "f", "--pid", &pid]), 0, "{name}");
        assert_eq!(place.names(), ["after", "before"], "{name}");
    }
}

#[test]
fn slots_in_user_space_have_one_holder_each() {
    let programs = needs!("bindfs", "mkntfs", "ntfs-3g");
    for (name, place, _mount) in in_user_space(needs!(admin), programs) {
        let run = ["run", "f", "-n", "--slots", "2", "--", "true"];
        let held: Vec<Child> = (0..2)
            .map(|_| place.started(&["--slots", "2"], "exec sleep 1000").0)
            .collect();
        assert_eq!(place.status(&run), BUSY, "{name}");
        for child in &held {
            signal(child, Signal::TERM);
        }
        for mut child in held {
            wait(&mut child);
        }
        assert_eq!(place.status(&run), 0, "{name}");
    }
}

/// An unlocked file proves nothing where the holder may have locked it under another path.
#[test]
fn a_lock_seen_under_two_mounts_has_one_holder() {
    let (admin, bindfs) = (needs!(admin), needs!("bindfs"));
    for (name, mount) in [
        ("bindfs", Mount::bindfs(admin, &bindfs)),
        ("overlay", Mount::overlay(admin)),
    ] {
        for is_held_above in [true, false] {
            let (here, there) = if is_held_above {
                (&mount.path, &mount.below)
            } else {
                (&mount.below, &mount.path)
            };
            let place = Place::within(here);
            let other = seen_in(&place, there);
            let (mut holder, pid) = place.started(&[], "exec sleep 1000");
            let run = ["run", "f", "-n", "--", "true"];
            for place in [&place, &other] {
                assert_eq!(
                    place.status(&run),
                    BUSY,
                    "{name}, held above: {is_held_above}"
                );
                assert_eq!(place.status(&["wait", "f", "--timeout", "0"]), 1, "{name}");
            }
            // Once the holder is provably gone, for two heartbeats, the lock is free under both.
            let _ = holder.kill();
            holder.wait().expect("a child");
            kill_process(pid, Signal::KILL).expect("it runs");
            eventually(PATIENCE, "both are gone", || is_gone(pid));
            let status = other.status(&AFTER_TWO_BEATS);
            assert_eq!(status, 0, "{name}, held above: {is_held_above}");
        }
    }
}

#[test]
fn a_mount_point_is_refused_at_once() {
    let admin = needs!(admin);
    let place = Place::new();
    for content in ["", "pid=99999999\ntimestamp=1\n"] {
        place.write("host.lock", content);
        place.write("f", "");
        let _mount = Mount::of_file(admin, &place.path("host.lock"), &place.path("f"));
        for (arguments, status) in [
            ("try f", 3),
            ("acquire f", 3),
            ("wait f", 3),
            ("release f", 3),
            ("release f --force", 3),
            ("clean f", 3),
            ("run f -- true", 74),
            ("hold f", 74),
        ] {
            let output = place.sema(&words(arguments));
            let why = "it is a mount point, so others may see another file";
            assert_fails(&output, arguments, status, why);
        }
        assert_eq!(place.read("host.lock"), content);
    }
}

/// As in a container, or after a reboot without a clock: only the kernel's locks tell.
#[test]
fn a_guard_with_another_boot_id_and_name_is_judged_by_its_lock() {
    needs!(admin);
    let place = Place::new();
    place.write("boot_id", "00000000-0000-4000-8000-000000000000\n");
    let script = "hostname elsewhere && mount --bind boot_id /proc/sys/kernel/random/boot_id && \
                  exec \"$0\" run f -- sh -c 'echo $$ >new; mv new started; exec sleep 1000'";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--uts", "--pid", "--fork", "--kill-child"])
        .args(["sh", "-c", script, program("sema")])
        .current_dir(&place.directory);
    let mut container = command.spawn().expect("unshare");
    eventually(PATIENCE, "the command runs", || {
        place.path("started").exists()
    });
    assert!(place
        .read("f")
        .contains("x-host=elsewhere\nx-boot=00000000-"));
    let run = ["run", "f", "-n", "--", "true"];
    assert_eq!(place.status(&run), BUSY);
    let _ = container.kill();
    container.wait().expect("a child");
    eventually(PATIENCE, "the lock is free at once", || {
        place.status(&run) == 0
    });
}
