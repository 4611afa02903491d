# Chooses a root, A or B, and starts its kernel. U-Boot runs these bytes on a Raspberry Pi and under qemu.
# slots.0 and slots.1 hold the state with a CRC, as gateway/host/boot_slots.py describes them. The valid one with the
# higher number counts, and the other one is written next, so a torn write costs nothing.
# Only a slot on trial is counted: power cuts never count against a good one.
# kernel_addr_r serves for reading until the kernel is loaded there. A default address of U-Boot for the ramdisk lies
# inside Debian's kernel.
setenv good a; setenv trial none; setenv tries 0; setenv number 0; setenv newest none; setenv newest_number 0; setenv older slots.0
setexpr ramdisk ${kernel_addr_r} + 5000000
for file in slots.0 slots.1; do
  if load ${devtype} ${devnum}:${distro_bootpart} ${kernel_addr_r} ${file} && test ${filesize} = 200 && env import -c ${kernel_addr_r} 200 number && itest ${number} -gt ${newest_number}; then
    env import -c ${kernel_addr_r} 200 good trial tries
    setenv newest ${file}; setenv newest_number ${number}
  fi
done
if test ${newest} = slots.0; then setenv older slots.1; fi
setenv order ${good}
if test ${trial} != none && itest ${tries} -gt 0; then
  setexpr tries ${tries} - 1; setexpr number ${newest_number} + 1
  env export -c -s 200 ${kernel_addr_r} number good trial tries
  if fatwrite ${devtype} ${devnum}:${distro_bootpart} ${kernel_addr_r} ${older} 200; then setenv order ${trial}; fi
fi
if test ${order} = a; then setenv order a b; else setenv order b a; fi
# Raspberry Pi Imager adds words to cmdline.txt.
setenv words
if load ${devtype} ${devnum}:${distro_bootpart} ${kernel_addr_r} cmdline.txt; then
  setexpr end ${kernel_addr_r} + ${filesize}; mw.b ${end} 0; setexpr.s words *${kernel_addr_r}
fi
for slot in ${order}; do
  if test ${slot} = a; then setenv part 2; else setenv part 3; fi
  part uuid ${devtype} ${devnum}:${part} root
  setenv bootargs "root=PARTUUID=${root} ro rootwait panic=10 rauc.slot=${slot} ${words}"
  echo "sluice: starting ${slot}; good ${good}, on trial ${trial} with ${tries} tries left; ${bootargs}"
  if load ${devtype} ${devnum}:${part} ${kernel_addr_r} /boot/vmlinuz && load ${devtype} ${devnum}:${part} ${ramdisk} /boot/initrd.img; then
    booti ${kernel_addr_r} ${ramdisk}:${filesize} ${fdt_addr}
  fi
done
reset
